"""A newer Temporal server than the CLI's, built from `temporal_1_32`. Run as a program, this file says where it is.

It can pause runs. Like `temporal_cli.py` this needs nothing but the standard library.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import golang
from caches import cached

VERSION = "1.32.0"
SOURCE = Path(__file__).parent / "temporal_1_32"


@functools.cache
def find_built() -> Path:
    """Return the program: what was built before from the same source, else build it, which takes minutes.

    Raises:
        RuntimeError: It could not be built.
    """
    files = [SOURCE / name for name in ("go.mod", "go.sum", "main.go")]
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return cached(f"temporal-server-{VERSION}-{source[:12]}", _build) / "temporal-server"


def _build(directory: Path) -> None:
    try:
        golang.build(["build", "-o", str(directory / "temporal-server"), "."], directory, {}, source=SOURCE)
    except RuntimeError as error:
        raise RuntimeError(
            f"There is no Temporal server {VERSION}: {error}. Install Go and see that its module proxy can be reached."
        ) from error


if __name__ == "__main__":
    print(find_built())  # noqa: T201
