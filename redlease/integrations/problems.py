"""What a web service answers when redlease raises in a request: problem details (RFC 9457), for any web framework."""

from __future__ import annotations

import json

from redlease.errors import AcquireTimeout, NotReplicated, QueueFull, RedleaseError, StaleFence, Unavailable, Withdrawn

CONTENT_TYPE = "application/problem+json"

# The answers go to strangers: neither the names of resources nor the address of the server is in them.
BUSY = 503, "The request could not be carried out now."
ANSWERS: dict[type[RedleaseError], tuple[int, str]] = {
    AcquireTimeout: (409, "Another request is at work on this. Send the request again later."),
    StaleFence: (409, "A newer holder has modified this, and nothing was overwritten."),
    QueueFull: BUSY,
    NotReplicated: BUSY,
    Withdrawn: BUSY,
    Unavailable: BUSY,
}
# A lost lease most of all: the handler had begun, so a client must not send the request again unseen.
FAILED = 500, "The request was stopped on its way. Find out what was done before you send it again."


def problem(error: RedleaseError, timeout_status: int) -> tuple[int, bytes]:
    """Returns the status and the body of the answer to a request in which `error` was raised.

    Args:
        error: What was raised.
        timeout_status: The status for `AcquireTimeout`, as a rule 409 or 423.
    """
    status, detail = next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), FAILED)
    if isinstance(error, AcquireTimeout):
        status = timeout_status
    return status, json.dumps({"title": type(error).__name__, "status": status, "detail": detail}).encode()
