"""Escapes text from other sources for a terminal."""

from __future__ import annotations


def plain(text: str) -> str:
    """Returns the text with unprintable and control characters escaped: a ticket may contain any character."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
