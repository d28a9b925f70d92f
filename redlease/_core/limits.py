"""Types of parameters, their limits, and checks that raise `ValueError`. Pure: workflow code imports it too."""

from __future__ import annotations

import json
import math
import re
import reprlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple, get_args

from redlease.models import Permit

Duration = float | timedelta  # a number is in seconds
Until = Duration | datetime | None  # a duration is from now on; None: for good

PREFIX_BYTES_MAX = 128
NAME_BYTES_MAX = 512
TICKET_BYTES_MAX = 256
OWNER_BYTES_MAX = 256
METADATA_BYTES_MAX = 4096
METADATA_JSON_BYTES_MAX = 8192  # as JSON, as the server stores it
CAPACITY_MAX = 2**31 - 1
HISTORY_MAX = 100_000  # entries, of some 70 bytes each
PRIORITY_MAX = 100
KEY_BYTES_MAX = 256
REASON_BYTES_MAX = 1024
SHARE_MIN, SHARE_MAX = 0.001, 1000
RATE_MAX = 1_000_000
LEASE_MS_MIN = 10
FENCE_MAX = 2**53 - 1  # what a double holds exactly: Lua has no other numbers
DURATION_MS_MAX = 366 * 24 * 3600 * 1000

_shown = reprlib.Repr()  # shortens values in error messages
_shown.maxstring = _shown.maxother = 80


def checked_text(what: str, text: str, bytes_max: int) -> str:
    """Returns the text; raises ValueError if it is empty or too long."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"the {what} must be a string that is not empty, not {_shown.repr(text)}")
    if len(text) * 4 > bytes_max or not text.isascii():
        size = _size(what, text)
        if size > bytes_max:
            raise ValueError(f"the {what} {text[:40]!r}... has {size} bytes; {bytes_max} are allowed")
    return text


def shortened(text: str, bytes_max: int) -> str:
    """Returns as much of the text as fits into `bytes_max` bytes."""
    return text.encode()[:bytes_max].decode(errors="ignore")


def _size(what: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the {what} {text[:40]!r} is not valid UTF-8") from None


def checked_prefix(prefix: str) -> str:
    """Returns the prefix; raises ValueError if it would break a key's hash tag or the name of a channel."""
    checked_text("prefix", prefix, PREFIX_BYTES_MAX)
    if re.search(r"^[:!]|[\s{}|\x00-\x1f\x7f]", prefix):
        raise ValueError(
            f"the prefix must have no spaces, braces, bars or control characters, nor begin with : or !, not {prefix!r}"
        )
    return prefix


def checked_count(what: str, count: int, low: int = 1, high: int = CAPACITY_MAX) -> int:
    """Returns the count; raises ValueError if it is not a whole number from `low` to `high`."""
    if type(count) is not int or not low <= count <= high:
        raise ValueError(f"{what} must be a whole number from {low} to {high}, not {_shown.repr(count)}")
    return count


def checked_priority(priority: int) -> int:
    """Returns the priority; raises ValueError if it is not a whole number from 0 to 100."""
    if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
        raise ValueError(f"priority must be a whole number from 0 to {PRIORITY_MAX}, not {_shown.repr(priority)}")
    return priority


def checked_share(share: float, key: str | None) -> float:
    """Returns the share; raises ValueError if it is not a number from 0.001 to 1000, or is given without a key."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not SHARE_MIN <= share <= SHARE_MAX:
        raise ValueError(f"share must be a number from {SHARE_MIN} to {SHARE_MAX}, not {_shown.repr(share)}")
    if key is None and share != 1:
        raise ValueError("share requires key: give key= too")
    return share


def checked_lock_delay(lock_delay: Duration, idle_ttl_ms: int) -> int:
    """Returns the lock delay in ms; raises ValueError if it is longer than the server keeps an idle resource."""
    delay_ms = milliseconds("lock_delay", lock_delay)
    if delay_ms > idle_ttl_ms:
        raise ValueError(
            f"lock_delay must be at most idle_ttl, {idle_ttl_ms / 1000:g} s, not {_shown.repr(lock_delay)}"
        )
    return delay_ms


def checked_reason(reason: str) -> dict[str, str]:
    """Returns the metadata of a limit; raises ValueError if the reason is no text, or too long."""
    return {"reason": checked_text("reason", reason, REASON_BYTES_MAX)} if reason != "" else {}


def checked_until(until: Until) -> str:
    """Returns when a limit ends, as the server reads it; raises ValueError for a time without zone, or no time."""
    if until is None:
        return ""
    if not isinstance(until, datetime):
        return str(milliseconds("until", until, 1))
    if until.tzinfo is None:
        raise ValueError(f"until needs a time zone, as in datetime.now(timezone.utc), not {until!r}")
    return f"@{max(0, int(until.timestamp() * 1000))}"


def checked_fence(fence: int) -> int:
    """Returns the fence; raises ValueError if it is not a whole number from 1 to 2**53 - 1."""
    if type(fence) is not int or not 0 < fence <= FENCE_MAX:
        hint = ": give `hold.fence` or `permit.fence`"
        raise ValueError(f"a fence is a whole number from 1 to 2**53 - 1, not {_shown.repr(fence)}{hint}")
    return fence


def checked_metadata(metadata: dict[str, str] | None, *, is_new: bool = True) -> dict[str, str]:
    """Returns the metadata; raises ValueError if it is not a small mapping of strings to strings.

    `is_new`: also checks the size as JSON, which permits of earlier releases may exceed.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()
    ):
        raise ValueError(f"metadata maps strings to strings, not {_shown.repr(metadata)}")
    if sum(_size("metadata", text) for pair in metadata.items() for text in pair) > METADATA_BYTES_MAX:
        raise ValueError(f"metadata may have {METADATA_BYTES_MAX} bytes in all")
    if is_new and metadata and len(_as_json(metadata).encode()) > METADATA_JSON_BYTES_MAX:
        raise ValueError(f"metadata may have {METADATA_JSON_BYTES_MAX} bytes as JSON; control characters take six each")
    return dict(metadata)


def _as_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def checked_permit(permit: Permit, resource: str) -> Permit:
    """Returns the permit; raises ValueError if it is not of that resource, or has invalid fields."""
    if not isinstance(permit, Permit) or permit.resource != resource:
        hint = (
            ""
            if isinstance(permit, Permit)
            else ". That of a hold is `hold.permit`, and `hold.release()` gives it back"
        )
        raise ValueError(f"{_shown.repr(permit)} is no permit of resource {resource!r}{hint}")
    checked_text("permit's ticket", permit.ticket, TICKET_BYTES_MAX)
    checked_count("the permit's weight", permit.weight)
    if type(permit.fence) is not int or permit.fence < 0:
        raise ValueError(f"the permit's fence must be a whole number, not {_shown.repr(permit.fence)}")
    if type(permit.lease_ms) is not int or not LEASE_MS_MIN <= permit.lease_ms <= DURATION_MS_MAX:
        lease_ms = _shown.repr(permit.lease_ms)
        raise ValueError(f"lease_ms of a permit must be from {LEASE_MS_MIN} to {DURATION_MS_MAX}, not {lease_ms}")
    return permit


def milliseconds(what: str, duration: Duration, low: int = 0) -> int:
    """Converts seconds or a timedelta to whole ms, rounded up; raises ValueError if below `low` or over a year."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ValueError(f"{what} must be seconds or a timedelta, not {_shown.repr(duration)}")
    if not low <= seconds * 1000 <= DURATION_MS_MAX:
        bounds = f"from {low / 1000:g} s to {DURATION_MS_MAX // 1000:,} s"
        raise ValueError(f"{what} must be {bounds}, not {_shown.repr(duration)}")
    return math.ceil(round(seconds * 1000, 6))


@dataclass(frozen=True, slots=True)
class Rate:
    """How many grants there may be in a time: over any T seconds at most `burst` + `count` / `per` * T.

    A burst of 1 keeps any two grants apart, and who is late for a token loses the time. With more, tokens gather
    meanwhile, so that the rate is reached. The server counts in whole ms: for more than 1,000 grants a second let the
    burst be at least those of 2 ms.

    Attributes:
        count: How many grants.
        per: In so many seconds.
        burst: How many may come at once after a pause.

    Example:
        >>> vendor = client.semaphore("vendor", capacity=5, rate=Rate(100, per=60, burst=20))
    """

    count: int
    per: Duration = 1.0
    burst: int = 1

    def __post_init__(self) -> None:
        checked_count("count of Rate", self.count, 1, RATE_MAX)
        per_ms = milliseconds("per of Rate", self.per, 1)
        checked_count("burst of Rate", self.burst, 1, RATE_MAX)
        if self.burst * per_ms > self.count * DURATION_MS_MAX:
            raise ValueError(
                f"the burst of Rate, {self.burst}, would take more than 366 days to gather: let it be smaller"
            )

    @property
    def packed(self) -> str:
        """How acquire takes it: µs between two grants, rounded up, and the burst."""
        return f"{-(-milliseconds('per', self.per) * 1000 // self.count)}:{self.burst}"


Full = Literal["wait", "refuse", "replace-waiter", "replace-holder"]
GRACE_S = 10.0


class WhenFull(NamedTuple):
    """What a request does that cannot be granted at once; a holder that it replaces has `grace_ms` to end."""

    mode: Full = "wait"
    grace_ms: int = round(GRACE_S * 1000)

    @classmethod
    def checked(cls, when_full: Full, grace: Duration, *, capacity: int, never_waits: bool, priority: int) -> WhenFull:
        """Returns both; raises ValueError for a wrong one, or one that cannot be combined with the rest."""
        if when_full not in get_args(Full):
            raise ValueError(f"when_full must be one of {', '.join(map(repr, get_args(Full)))}, not {when_full!r}")
        checked = cls(when_full, milliseconds("grace", grace))
        if checked.replaces and (never_waits or priority):
            what = "a timeout of 0" if never_waits else "a priority"
            raise ValueError(
                f"when_full={when_full!r} needs a place in the order of arrival, and so goes without {what}"
            )
        if checked.replaces and capacity == CAPACITY_MAX:
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
