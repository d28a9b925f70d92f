"""What takes minutes to fetch or build is made once a machine, under the user's cache directory, by one process."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def cache_directory() -> Path:
    """Return where this platform keeps what can be made again."""
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "redlease"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redlease"


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the directory of this name, which `make` fills when it is asked for the first time on this machine.

    Others who ask meanwhile, such as the second xdist worker, wait for the first. The directory appears whole, so one
    that was interrupted leaves nothing that looks finished.
    """
    place = cache_directory() / name
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=place.parent) as scratch:
                draft = Path(scratch) / "draft"
                draft.mkdir()
                make(draft)
                draft.rename(place)
    return place


def missing(*programs: str) -> list[str]:
    """Name those of the programs that are not on PATH."""
    return [program for program in programs if shutil.which(program) is None]
