"""How the work on one ticket record ends early: none of these errors leaves its tracker."""

from __future__ import annotations

from redlease import RedleaseError


class GoneError(Exception):
    """Another relay owns the record, or the record was dropped."""


class ExpiredError(Exception):
    """The queue entry expired or was removed."""


class RefusedError(Exception):
    """The server refused to queue the request."""

    def __init__(self, reason: RedleaseError | ValueError) -> None:
        super().__init__()
        self.reason = reason


class LostError(Exception):
    """The permit is lost, and the run may already believe that it holds it."""
