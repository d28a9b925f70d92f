"""Matches names against globs as Redis does."""

from __future__ import annotations

import re
from functools import lru_cache


def matches(name: str, pattern: str) -> bool:
    """Returns True if the name matches a glob as Redis has them: `*`, `?`, `[ab]`, `[a-z]`, `[^ab]`, and a backslash.

    As in Redis, `?` and a set stand for one byte of the UTF-8 text.
    """
    return _compiled(pattern).fullmatch(name.encode()) is not None


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[bytes]:
    """Returns the regular expression. After a `*` the first place that fits suffices, so nothing is tried twice."""
    runs, glob = [b""], pattern.encode()
    while glob:
        if glob[:1] == b"*":
            runs.append(b"")
            glob = glob[1:]
        else:
            one, glob = _first(glob)
            runs[-1] += one
    first, *rest = runs
    middle = b"".join(b"(?>.*?%b)" % run for run in rest[:-1] if run)
    return re.compile(first + middle + (b".*" + rest[-1] if rest else b""), re.DOTALL)


def _first(glob: bytes) -> tuple[bytes, bytes]:
    """Returns the expression for the first byte that the glob stands for, and the rest of the glob."""
    if glob[:1] == b"?":
        return b".", glob[1:]
    if glob[:1] == b"[":
        return _set(glob[1:])
    at = 1 if glob[:1] == b"\\" and len(glob) > 1 else 0
    return _literal(glob[at]), glob[at + 1 :]


def _set(glob: bytes) -> tuple[bytes, bytes]:
    """Returns the expression for a set and the rest of the glob, which begins after the opening bracket.

    An empty set matches nothing. A set without an end goes on to the end of the glob, and a range may end with "]".
    """
    negated, members = glob[:1] == b"^", b""
    glob = glob[negated:]
    while glob and glob[:1] != b"]":
        if glob[:1] == b"\\" and len(glob) > 1:
            members += _literal(glob[1])
            glob = glob[2:]
        elif glob[1:2] == b"-" and len(glob) > 2:
            members += b"%b-%b" % (*map(_literal, sorted((glob[0], glob[2]))),)
            glob = glob[3:]
        else:
            members += _literal(glob[0])
            glob = glob[1:]
    if not members:
        return (b"." if negated else b"(?!)"), glob[1:]
    return b"[%b%b]" % (b"^" if negated else b"", members), glob[1:]


def _literal(byte: int) -> bytes:
    return b"\\x%02x" % byte
