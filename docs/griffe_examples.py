"""Lets the reference show an "Example:" of a docstring as code, which griffe does for "Examples:" only."""

from __future__ import annotations

import re
from typing import Any

import griffe


class PlainExamples(griffe.Extension):
    """Reads one as the other."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of each object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
