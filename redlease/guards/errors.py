"""The error of a stale fence, whatever refused it."""

from __future__ import annotations

from redlease.errors import StaleFence


def stale_fence(resource: str, fence: int, reason: str, *, seen: int | None = None) -> StaleFence:
    """Returns the error for a fence that was refused; `seen`: the highest fence, if it is known."""
    return StaleFence(
        f"resource {resource!r}: fence {fence} {reason}. A later holder is at work: stop, and acquire again if "
        "there is work left to do",
        resource=resource,
        fence=fence,
        seen=seen,
    )
