"""Text from elsewhere, made fit for a terminal."""

from __future__ import annotations


def plain(text: str) -> str:
    """The text with what a terminal would not print, or would obey, as escapes: a ticket may hold any character."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
