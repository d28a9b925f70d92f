"""What redlease reports: the extra fields of its log records, and exceptions that it did not expect."""

from __future__ import annotations

import asyncio


def about(resource: str | None = None, ticket: str | None = None, fence: int | None = None) -> dict[str, object]:
    """Returns the `extra` of a record: formatters and filters find the fields, None if unknown, as its attributes."""
    return {"resource": resource, "ticket": ticket, "fence": fence}


def report(error: Exception) -> None:
    """Passes the exception to the event loop's exception handler, which logs it by default; the caller retries."""
    message = "redlease: unexpected error; retrying"
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
