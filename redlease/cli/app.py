"""The commands."""

# The annotations of commands are read at run time, so none of them is postponed.
import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from redlease import Redlease, RedleaseError, Semaphore, __version__

from .demo.command import run_demo
from .plain import plain
from .snapshot import UNDECLARED, is_known, show

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The name of the resource.")]
Url = Annotated[
    str,
    typer.Option(
        help="The server, cluster or Sentinels.", envvar="REDLEASE_URL", show_default="redis://localhost:6379/0"
    ),
]
Prefix = Annotated[str, typer.Option(help="What the keys begin with.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"redlease {__version__}")
        raise typer.Exit


@app.callback()
def redlease(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Locks and semaphores on Redis: a demo, and commands that inspect and change resources."""


TIMELINE = Path("redlease-demo.html")
LOCAL = "redis://localhost:6379/0"


@contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Prints the errors of a command without a traceback."""
    try:
        yield
    except (RedleaseError, ValueError, OSError) as error:
        lines = f"redlease: {error}".splitlines()  # several if it quotes the log of a server
        typer.echo("\n".join(map(plain, lines)), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    with _told_in_one_line():
        return asyncio.run(coroutine)


@asynccontextmanager
async def _resource(name: str, url: str, prefix: str) -> AsyncIterator[Semaphore]:
    # Only an acquire declares the capacity, and these commands do not acquire.
    async with Redlease.from_url(url, prefix=prefix) as client:
        yield client.semaphore(name, capacity=UNDECLARED)


@app.command()
def demo(
    url: Annotated[str | None, typer.Option(help="A server to run on, instead of an embedded one.")] = None,
    timeline: Annotated[Path, typer.Option(help="Where to write the timeline, an HTML page.")] = TIMELINE,
    rounds: Annotated[int, typer.Option(min=6, help="How many times each process takes the semaphore.")] = 15,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Eight processes share three permits, and two of them are killed. Exits with 1 if any promise was broken."""
    with _told_in_one_line():
        kept = run_demo(url, rounds=rounds, prefix=prefix, timeline=timeline, as_json=as_json)
    if not kept:
        raise typer.Exit(1)


@app.command()
def inspect(name: Name, url: Url = LOCAL, prefix: Prefix = "redlease", as_json: AsJson = False) -> None:
    """Show who holds a resource and who waits for it. Exits with 1 if the server knows nothing of that name."""

    async def look() -> bool:
        async with _resource(name, url, prefix) as resource:
            snapshot = await resource.inspect()
            show(snapshot, as_json=as_json)
            return is_known(snapshot)

    if not _run(look()):
        raise typer.Exit(1)


@app.command()
def watch(name: Name, url: Url = LOCAL, prefix: Prefix = "redlease", as_json: AsJson = False) -> None:
    """Show a resource again each time it changes, until Ctrl-C."""

    async def look() -> None:
        async with _resource(name, url, prefix) as resource:
            async for snapshot in resource.watch():
                show(snapshot, as_json=as_json)

    _run(look())


@app.command()
def release(
    name: Name,
    ticket: Annotated[str, typer.Argument(help="Of the holder or waiter to take out.")],
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
) -> None:
    """Remove a ticket, as holder or from the queue, and notify its process. Exits with 1 if there was none."""

    async def take_out() -> bool:
        async with _resource(name, url, prefix) as resource:
            return await resource.release(ticket)

    released = _run(take_out())
    told = f"{ticket} is taken out of {name}." if released else f"{name} has no holder and no waiter {ticket}."
    typer.echo(plain(told))
    if not released:
        raise typer.Exit(1)


@app.command()
def resize(
    name: Name,
    capacity: Annotated[int, typer.Argument(help="Units that may be held at once.")],
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
) -> None:
    """Set the capacity of a resource, until a process declares a new one."""

    async def set_it() -> None:
        async with _resource(name, url, prefix) as resource:
            await resource.resize(capacity)

    _run(set_it())
    typer.echo(plain(f"The capacity of {name} is {capacity} now."))
