"""What a request does that cannot be granted at once."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from . import limits
from .limits import Duration

Full = Literal["wait", "refuse", "replace-waiter", "replace-holder"]
GRACE_S = 10.0


class WhenFull(NamedTuple):
    """What a request does that cannot be granted at once; a holder that it replaces has `grace_ms` to end."""

    mode: Full = "wait"
    grace_ms: int = round(GRACE_S * 1000)

    @classmethod
    def checked(cls, when_full: Full, grace: Duration, *, capacity: int, never_waits: bool, priority: int) -> WhenFull:
        """Returns both; raises ValueError for a wrong one, or for one that goes not with the rest of the request."""
        if when_full not in get_args(Full):
            raise ValueError(f"when_full must be one of {', '.join(map(repr, get_args(Full)))}, not {when_full!r}")
        checked = cls(when_full, limits.milliseconds("grace", grace))
        if checked.replaces and (never_waits or priority):
            what = "a timeout of 0" if never_waits else "a priority"
            raise ValueError(
                f"when_full={when_full!r} needs a place in the order of arrival, and so goes without {what}"
            )
        if checked.replaces and capacity == limits.CAPACITY_MAX:
            raise ValueError(
                f"a read-write lock has no when_full={when_full!r}: its readers do not take each other's place"
            )
        return checked

    @property
    def refuses(self) -> bool:
        """Whether it is refused then."""
        return self.mode == "refuse"

    @property
    def replaces(self) -> bool:
        """Whether it takes the place of others."""
        return self.mode in {"replace-waiter", "replace-holder"}


WAITS = WhenFull()
