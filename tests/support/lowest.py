"""The lowest versions that pyproject.toml allows. Run as a program, this file prints them for pip."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest() -> list[str]:
    """Return a requirement with a fixed version for each dependency, that of workflows included."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["temporal"]]
    return [re.sub(r">=([\d.]+).*", r"==\1", each) for each in declared]


if __name__ == "__main__":
    print("\n".join(lowest()))  # noqa: T201
