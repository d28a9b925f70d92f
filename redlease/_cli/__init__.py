"""The `redlease` command: a demo, and commands for operators that inspect and change resources."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command, or says in one line how to install what it needs."""
    try:
        from .app import app  # noqa: PLC0415 - typer and rich come with an extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.exit(f"redlease: this command needs {error.name}. Install it with: pip install 'redlease[cli]'")
    app()
