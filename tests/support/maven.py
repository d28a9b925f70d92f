"""Maven, which fetches what is in Java."""

from __future__ import annotations

import subprocess

from caches import missing


def require(what: str, *others: str) -> None:
    """Raise RuntimeError if this machine lacks what fetches and runs a program in Java, or one of the others."""
    if absent := missing("java", "mvn", *others):
        raise RuntimeError(f"{what} needs {' and '.join(absent)} (Debian: apt-get install default-jdk-headless maven)")


def fetch(what: str, *words: str) -> None:
    """Run Maven with these words, which fetch that."""
    done = subprocess.run(
        ["mvn", "--batch-mode", "--quiet", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"Maven could not fetch {what}: {done.stdout.strip()[-1000:]}")
