"""What the site has beyond its pages: the README as its first page, links to the source, and Markdown for machines.

`build/site/llms.txt` lists every page; each has a twin in Markdown beside it: `threads.html` and `threads.md`.
"""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
FIRST_PAGE, README = "index.md", "README.md"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")

_twins: dict[str, str] = {}  # the pages of this build in Markdown, by their place in the site
_navigation: list[Navigation] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the README the first page."""
    _twins.clear()
    _navigation.clear()
    files.append(File.generated(config, FIRST_PAGE, content=(ROOT / README).read_text()))
    return files


def on_nav(nav: Navigation, **_: Any) -> None:
    """Keep the order of the pages for `llms.txt`."""
    _navigation.append(nav)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Let links that leave the site lead to the repository, and keep the page's twin."""
    place = page.file.src_uri
    source = README if place == FIRST_PAGE else f"docs/{place}"

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
        if target.startswith("docs/"):
            return posixpath.relpath(target, posixpath.dirname(f"docs/{place}"))
        if not (ROOT / target).exists():
            return link[0]  # of which the build warns
        return f"{config.repo_url}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"

    markdown = LINK.sub(led, markdown)
    if place == FIRST_PAGE:
        page.edit_url = f"{config.repo_url}/edit/main/{README}"
    _twins[place] = re.sub(r"^::: ([\w.]+)$", lambda directive: reference(directive[1]), markdown, flags=re.MULTILINE)
    return markdown


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Write the twins and `llms.txt`."""
    site = Path(config.site_dir)
    for place, markdown in _twins.items():
        (site / place).write_text(markdown, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", *listed(_navigation[0].items, config, 2)]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def listed(items: list[Any], config: MkDocsConfig, level: int) -> Iterator[str]:
    """Yield a line for each page, under a heading for each section."""
    for item in items:
        if item.is_section:
            yield from ("", f"{'#' * level} {item.title}", "", *listed(item.children, config, level + 1))
        else:
            yield f"- [{item.title}]({config.site_url}{item.file.src_uri})"


@functools.cache
def source_of(package: str) -> Any:
    """Return what stands in the source of a package."""
    paths = [ROOT, ROOT / "adapters"]
    return griffe.load(package, search_paths=paths, allow_inspection=False, resolve_aliases=True)


def reference(name: str) -> str:
    """Return what the docstrings say of a public name, in Markdown."""
    thing = source_of(name.partition(".")[0])[name.partition(".")[2]]
    parts = [described(name, thing)]
    if thing.is_class:
        members = {key: each for key, each in thing.all_members.items() if not key.startswith("_") and each.docstring}
        parts += [described(f"{thing.name}.{key}", each) for key, each in members.items()]
    return "\n\n".join(parts)


def described(name: str, thing: Any) -> str:
    """Return one name with its signature and docstring."""
    title = thing.signature(name=name) if thing.is_function else name
    docstring = thing.docstring.value if thing.docstring else ""
    return f"### `{title}`\n\n{docstring.replace('  # doctest: +SKIP', '')}"
