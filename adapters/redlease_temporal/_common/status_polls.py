"""How the workflows that keep permits look at the runs that own them, and when a look keeps the permit. Pure."""

from __future__ import annotations

from datetime import timedelta

POLL_TIMEOUT = timedelta(seconds=20)  # of one look: a coordinator expires no lease meanwhile


def is_renewed_after(status: str, unknown_before: int, unknown_max: int) -> bool:
    """Whether a permit is renewed after a look reported this status of its owner.

    Args:
        status: "open", "closed", "continued", "reset", or "unknown" if the server did not answer.
        unknown_before: Consecutive looks without an answer before this one.
        unknown_max: The most such looks for which a permit is kept. Changing it breaks the replay of running
            workflows.
    """
    return status == "open" or (status == "unknown" and unknown_before < unknown_max)
