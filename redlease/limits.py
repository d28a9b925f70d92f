"""What a user may pass: the limits, and the checks that end in `ValueError`. Pure, and fit for a workflow sandbox."""

from __future__ import annotations

import math
import re
from datetime import timedelta

Duration = float | timedelta  # a number is in seconds

PREFIX_BYTES_MAX = 128
NAME_BYTES_MAX = 512
TICKET_BYTES_MAX = 256
OWNER_BYTES_MAX = 256
METADATA_BYTES_MAX = 4096
CAPACITY_MAX = 2**31 - 1
LEASE_MS_MIN = 10
DURATION_MS_MAX = 366 * 24 * 3600 * 1000


def checked_text(what: str, text: str, bytes_max: int) -> str:
    """The text, or ValueError when it is empty or too long."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"the {what} must be a string that is not empty, not {text!r}")
    if len(text) * 4 > bytes_max or not text.isascii():
        size = _size(what, text)
        if size > bytes_max:
            raise ValueError(f"the {what} {text[:40]!r}... has {size} bytes; {bytes_max} are allowed")
    return text


def _size(what: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the {what} {text[:40]!r} can not be written as UTF-8") from None


def checked_prefix(prefix: str) -> str:
    """The prefix, or ValueError when it would break a key's hash tag or the name of a channel."""
    checked_text("prefix", prefix, PREFIX_BYTES_MAX)
    if re.search(r"[\s{}|\x00-\x1f\x7f]", prefix):
        raise ValueError(f"the prefix must have no spaces, braces, bars or control characters, not {prefix!r}")
    return prefix


def checked_count(what: str, count: int, low: int = 1) -> int:
    """The count, or ValueError when it is no whole number from `low` to 2**31 - 1."""
    if type(count) is not int or not low <= count <= CAPACITY_MAX:
        raise ValueError(f"{what} must be a whole number from {low} to {CAPACITY_MAX}, not {count!r}")
    return count


def checked_metadata(metadata: dict[str, str] | None) -> dict[str, str]:
    """The metadata, or ValueError when it is not a small mapping of strings to strings."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()
    ):
        raise ValueError(f"metadata maps strings to strings, not {metadata!r}")
    if sum(_size("metadata", text) for pair in metadata.items() for text in pair) > METADATA_BYTES_MAX:
        raise ValueError(f"metadata may have {METADATA_BYTES_MAX} bytes in all")
    return dict(metadata)


def milliseconds(what: str, duration: Duration, low: int = 0) -> int:
    """A duration in seconds or a timedelta as whole ms, rounded up; ValueError when below `low` or over a year."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or math.isnan(seconds):
        raise ValueError(f"{what} must be seconds or a timedelta, not {duration!r}")
    if not low <= seconds * 1000 <= DURATION_MS_MAX:
        bounds = f"from {low / 1000:g} s to {DURATION_MS_MAX // 1000:,} s"
        raise ValueError(f"{what} must be {bounds}, not {duration!r}")
    return math.ceil(round(seconds * 1000, 6))
