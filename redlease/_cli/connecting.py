"""What all commands share: their options, a client for the server that they name, and errors reported in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, TypeVar

import typer

from redlease import Redlease, RedleaseError, Semaphore
from redlease._core.primitives.overview import UNDECLARED

from .plain import printable
from .statuses import Exit

T = TypeVar("T")

LOCAL = "redis://localhost:6379/0"

Name = Annotated[str, typer.Argument(help="The name of the resource.")]
Url = Annotated[
    str,
    typer.Option(
        help="The server, cluster or Sentinels.", envvar="REDLEASE_URL", show_default="redis://localhost:6379/0"
    ),
]
Prefix = Annotated[str, typer.Option(help="What the keys begin with.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_error(error: object) -> None:
    """Prints an error on the standard error stream, with what a terminal would obey escaped."""
    lines = f"redlease: {error}".splitlines()  # several if it quotes the log of a server
    typer.echo("\n".join(map(printable, lines)), err=True)


class NothingKnown(Exception):
    """The server knows nothing of a resource that was to be changed."""


@contextmanager
def in_one_line(status: int = 1) -> Iterator[None]:
    """Prints the errors of a command without a traceback, and exits with that status, or with one that says which."""
    try:
        yield
    except NothingKnown as error:
        print_error(error)
        raise typer.Exit(Exit.UNKNOWN) from None
    except RedleaseError as error:
        print_error(error)
        raise typer.Exit(status if isinstance(error, ValueError) else Exit.UNAVAILABLE) from None
    except (ValueError, OSError) as error:
        print_error(error)
        raise typer.Exit(status) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def run(coroutine: Coroutine[Any, Any, T], *, status: int = 1) -> T:
    """Runs a command to its end; an error exits with that status, or with one that says which."""
    with in_one_line(status):
        return asyncio.run(coroutine)


@asynccontextmanager
async def resource_at(name: str, url: str, prefix: str) -> AsyncIterator[Semaphore]:
    """Connects, for commands that see or change a resource: unlike an acquire, they declare no capacity."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        yield client.semaphore(name, capacity=UNDECLARED)
