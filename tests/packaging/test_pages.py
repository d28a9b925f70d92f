"""The pages say what is true: every example runs or has its types checked, and every name, command and link exists."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import redlease
from redlease import Lock, Redlease, RedleaseError, Semaphore
from redlease._cli.app import app
from redlease.testing import fake_client

from fragments import GIVEN
from pages import DOCS, PAGES, ROOT, Block, blocks, make_targets, python_blocks

FRAMEWORKS = ("celery", "django", "fastapi", "jupyter", "pytest", "rq", "scheduled-jobs", "simulate", "sqlalchemy")
# Whole programs and files, with the tests that run them.
RUN_ELSEWHERE = {
    **{f"docs/how-to/{name}.md": f"integrations/test_{name.replace('-', '_')}.py" for name in FRAMEWORKS},
    "docs/guide/workflows.md": "temporal/test_workflow_pages.py",
    "docs/how-to/batch-collector.md": "temporal/test_how_to.py",
    "docs/how-to/circuit-breaker.md": "temporal/test_how_to.py",
    "docs/how-to/debounce.md": "temporal/test_how_to.py",
    "docs/how-to/pipeline.md": "temporal/test_how_to.py",
    "docs/migrating/python-redis-lock.md": "packaging/test_migrating.py",
    "docs/migrating/redis-py.md": "packaging/test_migrating.py",
    "docs/tutorial.md": "packaging/test_tutorial.py",
}
# Of this page only the first two need Temporal.
FRAGMENTS_ON = {"docs/sequences.md": 2}


def all_blocks() -> list[Block]:
    """Return the blocks of Python on all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language == "python"]


def is_fragment(block: Block) -> bool:
    """Tell whether a block is a part of a program, whose names are given in `fragments.py`."""
    place = [each.number for each in python_blocks(block.page)].index(block.number)
    return block.page in GIVEN and place < FRAGMENTS_ON.get(block.page, place + 1)


def is_of_a_workflow(block: Block) -> bool:
    """Tell whether this is the file of workflows in the README, which is that of the page on workflows."""
    return block.page == "README.md" and "temporalio" in block.text


def runs_here(block: Block) -> bool:
    """Tell whether a block is an example that this file runs."""
    return not is_fragment(block) and block.page not in RUN_ELSEWHERE and not is_of_a_workflow(block)


def id_of(block: Block) -> str:
    """Return a name for an example: its page and its number there."""
    return f"{block.page}:{block.number}"


def table(page: str) -> list[list[str]]:
    """Return the rows of the first table of a page, without its head."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("block", [block for block in all_blocks() if runs_here(block)], ids=id_of)
def test_an_example_runs_as_it_stands(block: Block) -> None:
    """As in `python -m asyncio` with an open client; one with an event loop of its own runs as a script."""
    compiled = compile(block.text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "__main__"}
    if not compiled.co_flags & inspect.CO_COROUTINE:
        exec(compiled, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]

    async def run_in_client() -> None:
        async with fake_client() as names["client"]:
            await eval(compiled, names)

    async def run_test(test: Any) -> None:
        async with fake_client() as client:
            await test(redlease_client=client)

    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(asyncio.wait_for(run_in_client(), 30))
    for test in tests:
        asyncio.run(run_test(test))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fragments_have_types_that_fit(tmp_path: Path) -> None:
    """What is a part of a program passes a strict checker, after what its page takes for granted."""
    files = []
    for number, block in enumerate(filter(is_fragment, all_blocks())):
        head = '# mypy: disable-error-code="empty-body, no-untyped-call"\n'
        body = textwrap.indent(block.text, "    ")
        files.append(tmp_path / f"fragment_{number}.py")
        files[-1].write_text(f"{head}{GIVEN[block.page]}\nasync def fragment() -> None:\n{body}")
    assert len(files) >= 12
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_taken_care_of() -> None:
    """No page is named that is not there, and a test that is said to run a page's files names it."""
    assert {ROOT / page for page in {*RUN_ELSEWHERE, *GIVEN}} <= set(PAGES)
    for page, test in RUN_ELSEWHERE.items():
        text = (ROOT / "tests" / test).read_text()
        assert Path(page).stem in text or Path(page).stem.replace("-", "_") in text, page
    fences = sum(page.read_text().count("```python") for page in PAGES)
    assert fences == len(all_blocks())


def test_the_readme_is_short() -> None:
    """At most 150 lines, and its workflow is that of the page on workflows, whose files run on Temporal."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    (flow,) = (block for block in python_blocks("README.md") if is_of_a_workflow(block))
    assert flow.text == python_blocks("docs/guide/workflows.md")[0].text


def test_the_readme_on_pypi_has_no_relative_links() -> None:
    """PyPI shows it without the repository, so the build makes URLs of all of them, other ones of pictures."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "README.md").read_text()
    for each in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    links = re.findall(r"\]\(([^)#][^)]*)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    assert "https://raw.githubusercontent.com/redlease/redlease/main/docs/demo.svg" in links
    assert "https://github.com/redlease/redlease/blob/main/docs/tutorial.md" in links


def test_every_page_is_in_the_navigation() -> None:
    """Each page is there once; the README is the first page of the site."""

    def places(items: list[Any]) -> list[str]:
        found: list[str] = []
        for item in items:
            value = next(iter(item.values())) if isinstance(item, dict) else item
            found += places(value) if isinstance(value, list) else [value]
        return found

    nav = places(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(["index.md", *(str(page.relative_to(DOCS)) for page in PAGES[1:])])


def slugs(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site both make of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


LINKING = [*PAGES, *ROOT.glob("*.md"), ROOT / "tests/README.md", *ROOT.glob(".github/*.md")]


@pytest.mark.parametrize("page", dict.fromkeys(LINKING), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Each relative link leads to a file, and each anchor to a heading, as GitHub shows the page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        # The reference has anchors of names too, which the site's build checks.
        if anchor and "." not in anchor:
            assert anchor in slugs(target), f"{path}#{anchor}"


def test_every_command_exists() -> None:
    """What the pages show of `make` and `redlease` are targets and commands."""
    texts = "\n".join(block.text for page in [*PAGES, ROOT / "CONTRIBUTING.md"] for block in blocks(page))
    made = " ".join(re.findall(r"^\$ make ([\w -]+?)(?= ARGS|  |$)", texts, re.MULTILINE))
    assert set(made.split()) <= make_targets()
    commands = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
    shown = set(re.findall(r"^\$ (?:.*; )?redlease (\w[\w-]*)", texts, re.MULTILINE))
    assert {"ls", "run", "doctor"} <= shown <= commands


def test_every_error_is_in_the_table() -> None:
    """No error is missing there, and none is invented."""
    named = {row[0].strip("`") for row in table("reference/errors.md")} - {"ValueError"}
    public = {name for name in redlease.__all__ if isinstance(getattr(redlease, name), type)}
    assert named == {name for name in public if issubclass(getattr(redlease, name), RedleaseError)}


@pytest.mark.parametrize("row", table("reference/parameters.md"), ids=lambda row: row[0])
def test_every_parameter_is_where_the_table_says(row: list[str]) -> None:
    """Each name is a parameter of what it is said to be of."""
    name, of = row[0].strip("`"), [part.strip("` ") for part in row[1].split(",")]
    places: dict[str, list[Any]] = {
        "client": [Redlease, Redlease.from_url],
        "primitive": [Redlease.lock, Redlease.semaphore, Redlease.rwlock],
        "request": [Semaphore.hold, Semaphore.acquire, Semaphore.try_acquire],
        "semaphore": [Redlease.semaphore],
        "client.all": [Redlease.all],
    }
    for part in of:
        for place in places.get(part) or [getattr(Lock, part)]:
            assert name in inspect.signature(place).parameters, f"{place} has no {name}"
