"""The programs of `examples/temporal/languages.py` that are not in Python, built once from the same source.

Run as a program, this file builds them and prints the words that the example is given. It needs nothing but the
standard library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
import shutil
from pathlib import Path

import golang
import node
import typescript
from caches import cached

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "temporal"
CALLER = ROOT / "adapters" / "languages" / "go"
COMPILED = {"extends": "./node_modules/redlease/tsconfig.json", "include": ["service.ts"]}


@functools.cache
def words() -> list[str]:
    """Return the worker in Go, Node.js, and the service in TypeScript.

    Raises:
        RuntimeError: Something could not be fetched or built.
    """
    files = [*sorted(path for source in (EXAMPLES / "go", CALLER) for path in source.rglob("*") if path.is_file())]
    worker = cached(f"example-go-{_digest(files)}", _build_worker) / "worker"
    client = typescript.built(ROOT / "redlease")
    build = functools.partial(_build_service, client)
    service = cached(f"example-typescript-{client.name}-{_digest([EXAMPLES / 'service.ts'])}", build)
    return [str(worker), str(node.find_node()), str(service / "dist" / "service.js")]


def _build_worker(directory: Path) -> None:
    golang.build(["build", "-o", str(directory / "worker"), "."], directory, {}, source=EXAMPLES / "go")


def _build_service(client: Path, directory: Path) -> None:
    modules = directory / "node_modules"
    modules.mkdir()
    for package in node.modules(typescript.SOURCE).iterdir():
        (modules / package.name).symlink_to(package)
    (modules / "redlease").symlink_to(client)
    shutil.copy(EXAMPLES / "service.ts", directory)
    options = COMPILED | {"compilerOptions": {"rootDir": ".", "outDir": "dist", "typeRoots": ["node_modules/@types"]}}
    (directory / "tsconfig.json").write_text(json.dumps(options))
    (directory / "package.json").write_text('{"type": "module"}')
    node.compile_typescript(directory)


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


if __name__ == "__main__":
    print(shlex.join(words()))  # noqa: T201
