"""A newcomer's hour: every file and command of docs/tutorial.md, in order, with the wheel in an empty environment."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pages import DOCS, ROOT, Block, blocks
from temporal_cli import find_cli

WITHIN_S = 240  # on a busy machine; on an idle one it takes some 30 s
MARK = "-- block"
# A thread of Temporal's SDK may crash Python 3.11 as it goes down (temporalio/sdk-python#300), with all work done.
MAY_CRASH = "python main.py"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The wheel that `make` has built, or one of the source tree."""
    if os.environ.get("REDLEASE_TEST_WHEEL"):
        return next((ROOT / "dist").glob("redlease-*.whl"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", str(ROOT)]
    subprocess.run(build, cwd=tmp_path, check=True)
    return next((tmp_path / "dist").glob("redlease-*.whl"))


def commands(block: Block) -> list[str]:
    """Return the commands of a block."""
    return re.findall(r"^\$ (.*)$", block.text, re.MULTILINE)


def script(page: list[Block]) -> str:
    """Return a script for a shell that does what the page says, and ends at the first thing that fails."""
    lines = ["trap 'kill $(jobs -p) 2>/dev/null' EXIT", "exec 2>&1"]
    for block in page:
        if block.file:
            lines.append(f"printf %s {shlex.quote(block.text)} >{block.file}")
        lines.append(f"echo '{MARK} {block.number}'")
        for command in commands(block) if block.language == "console" else []:
            crashed = "[ $status -gt 128 ] || " if command == MAY_CRASH else ""
            failed = f"{{ echo 'failed:' {shlex.quote(command)}; exit 1; }}"
            lines += [command, f"status=$?; [ $status = 0 ] || {crashed}{failed}"]
    return "\n".join(lines)


def plain(line: str) -> str:
    """Return a line without what differs from run to run: fences, durations, and the spaces of a table."""
    return " ".join(re.sub(r"\d+(\.\d+)? m?s\b", "TIME", re.sub(r"\b\d{16}\b", "FENCE", line)).split())


def surroundings(tmp_path: Path, wheel: Path) -> dict[str, str]:
    """Return the environment of a shell that knows Python, Temporal's CLI, and `redlease` by its wheel alone."""
    programs = tmp_path / "programs"
    programs.mkdir()
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    for name, target in {"python3": python, "temporal": find_cli()}.items():
        (programs / name).symlink_to(target)
    kept = {name: value for name, value in os.environ.items() if not re.match("PYTHON|COV|VIRTUAL|REDLEASE", name)}
    return kept | {
        "PATH": f"{programs}:/usr/bin:/bin",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": str(wheel.parent),
        "PIP_QUIET": "1",
    }


def run(text: str, directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a script in a session of its own, which is ended in time; return its status and what it printed."""
    output = directory / "output"
    with output.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", text],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(WITHIN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            status = shell.wait()
    return status, output.read_text()


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 60)
def test_every_command_and_file_works_as_written(tmp_path: Path, wheel: Path) -> None:
    """Each command succeeds, and prints the lines that the page shows below it, in their order."""
    page = blocks(DOCS / "tutorial.md")
    status, told = run(script(page), tmp_path, surroundings(tmp_path, wheel))
    assert status == 0, told
    printed = re.split(rf"^{MARK} \d+\n", told, flags=re.MULTILINE)[1:]
    assert len(printed) == len(page)
    for block, output in zip(page, printed, strict=True):
        shown = [plain(line) for line in block.text.splitlines() if not line.startswith("$ ")]
        lines = iter(plain(line) for line in output.splitlines())
        if block.language == "console":
            assert all(line in lines for line in shown), f"{block.text}\nprinted\n{output}"


def test_the_tutorial_has_a_program_for_each_step() -> None:
    """Every file is one that a command runs or another file imports, and the last one is a workflow under a lock."""
    page = blocks(DOCS / "tutorial.md")
    files = [block.file for block in page if block.file]
    run = " ".join(command for block in page if block.language == "console" for command in commands(block))
    assert [name for name in files if name not in run] == ["train.py"]
    assert "from train import" in next(block.text for block in page if block.file == "main.py")


@pytest.mark.parametrize(("ends", "status"), [("kill -ABRT $$", 0), ("exit 1", 1), ("exit 0", 0)])
def test_a_crash_as_python_goes_down_is_told_from_a_failure(tmp_path: Path, ends: str, status: int) -> None:
    """Only of the one program that may crash when all is done; whether it was done, its output shows."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{ends}\n")
    program.chmod(0o755)
    page = [Block("page", 0, "console", None, f"$ {MAY_CRASH}\n")]
    assert run(script(page), tmp_path, os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"})[0] == status
