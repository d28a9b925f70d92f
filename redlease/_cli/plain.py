"""Writes text and times for a terminal."""

from __future__ import annotations


def plain(text: str) -> str:
    """Returns a name or the like, which may contain any character, escaped so that no two of them look alike."""
    return printable(text.replace("\\", r"\\"))


def printable(text: str) -> str:
    """Returns a sentence with unprintable and control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def span(span_ms: int) -> str:
    """Returns a time in at most two units: `0.4 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    seconds = span_ms // 1000
    if seconds < 60:
        return f"{span_ms // 100 / 10:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86_400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds // 86_400} d {seconds % 86_400 // 3600} h"
