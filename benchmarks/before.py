"""An earlier version of this library, installed from its commit, to be measured beside the present one."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def installed(commit: str) -> Iterator[Path]:
    """Gives a directory with the library as it was at a commit.

    Raises:
        CalledProcessError: There is no such commit, or its wheel cannot be built.
    """
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory) / "source", Path(directory) / "installed"
        source.mkdir()
        git = shutil.which("git")
        assert git is not None, "git is needed to measure an earlier version"
        archive = subprocess.run([git, "archive", "--format=zip", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        with zipfile.ZipFile(io.BytesIO(archive.stdout)) as files:
            files.extractall(source)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        subprocess.run([*pip, "--target", str(target), str(source)], check=True)
        yield target
