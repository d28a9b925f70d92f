"""The extra fields of redlease's log records: every record of the logger `redlease` has them, None if unknown."""

from __future__ import annotations


def about(resource: str | None = None, ticket: str | None = None, fence: int | None = None) -> dict[str, object]:
    """Returns the `extra` of a record: formatters and filters find the fields as attributes of the record."""
    return {"resource": resource, "ticket": ticket, "fence": fence}
