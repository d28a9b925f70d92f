"""The TypeScript client and its tests, built once a machine. Run as a program, this file says where they are.

Like `temporal_cli.py` it needs nothing but the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
from pathlib import Path

from caches import cached
from node import compile_typescript, find_node, modules, run

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "adapters" / "typescript"
PAGES = (ROOT / "docs" / "languages-typescript.md", SOURCE / "README.md")


@functools.cache
def built(package: Path) -> Path:
    """Return the directory in which the client and its tests are built.

    Args:
        package: The Python package, whose scripts it takes.

    Raises:
        RuntimeError: Something could not be fetched or built.
    """
    digest = hashlib.sha256()
    files = [
        *_sources(),
        *PAGES,
        *sorted(package.glob("_core/lua/**/*.lua")),
        *sorted(package.glob("guards/lua/*.lua")),
    ]
    for file in files:
        digest.update(file.read_bytes())
    return cached(f"typescript-{digest.hexdigest()[:12]}", functools.partial(_build, package))


def _sources() -> list[Path]:
    files = (path for folder in ("src", "scripts", "test") for path in sorted((SOURCE / folder).iterdir()))
    heads = [SOURCE / name for name in ("package.json", "package-lock.json", "tsconfig.json")]
    return [*heads, *(path for path in files if path.name != "lua.ts")]


def _build(package: Path, directory: Path) -> None:
    for file in _sources():
        place = directory / file.relative_to(SOURCE)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(file, place)
    (directory / "node_modules").symlink_to(modules(SOURCE))
    pages = "".join(page.read_text() for page in PAGES)
    for number, example in enumerate(re.findall(r"^```ts\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)):
        (directory / "test" / f"example{number}.ts").write_text(example)
    run([str(find_node()), "scripts/lua.mjs"], directory, REDLEASE_PYTHON=str(package))
    compile_typescript(directory)


if __name__ == "__main__":
    print(built(ROOT / "redlease"))  # noqa: T201
