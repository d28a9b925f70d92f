"""The commands."""

# The annotations of commands are read at run time, so none of them is postponed.
from pathlib import Path
from typing import Annotated

import typer

from redlease import HistoryEntry, Redlease, __version__
from redlease._core.limits import HISTORY_MAX
from redlease._core.primitives.overview import Overview, is_known

from .bench import measure, show_measured
from .changing import (
    Create,
    LimitJob,
    Target,
    Yes,
    apply_limit,
    end_pause,
    lift_limits,
    release_everybody,
    release_ticket,
    set_capacity,
    set_pause,
    show_change,
)
from .connecting import LOCAL, AsJson, Name, Prefix, Url, in_one_line, print_error, resource_at, run
from .demo.command import run_demo
from .doctor.examination import examine
from .doctor.findings import show_findings
from .history import show_history
from .listing import show_list
from .plain import plain
from .running import Job, run_job
from .snapshot import show
from .statuses import Exit
from .top.command import show_top
from .top.terminal import is_terminal
from .web import serve_view

app = typer.Typer(no_args_is_help=True)


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
    """Locks and semaphores on Redis: runs commands under permits, and inspects and changes resources and servers."""


TIMELINE = Path("redlease-demo.html")


@app.command()
def demo(
    url: Annotated[str | None, typer.Option(help="A server to run on, instead of an embedded one.")] = None,
    timeline: Annotated[Path, typer.Option(help="Where to write the timeline, an HTML page; or an .svg.")] = TIMELINE,
    rounds: Annotated[int, typer.Option(min=6, help="How many times each process takes the semaphore.")] = 15,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Eight processes share three permits, and two of them are killed. Exits with 1 if any promise was broken."""
    with in_one_line():
        kept = run_demo(url, rounds=rounds, prefix=prefix, timeline=timeline, as_json=as_json)
    if not kept:
        raise typer.Exit(1)


@app.command("ls")
def list_resources(
    pattern: Annotated[str, typer.Argument(help="A glob that names match, in quotes: 'gpu-*'.")] = "*",
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """List the resources: what is held, who waits. Those come first whose waiters have waited longest.

    Exits with 1 if one of them cannot be read; its line says why.
    """

    async def look() -> None:
        async with Redlease.from_url(url, prefix=prefix) as client:
            listed = await Overview(client._operations, pattern).look()
        show_list(listed, as_json=as_json)
        if not listed:
            print_error(f"no resource under the prefix {prefix!r} matches {pattern!r}")
        if any(each.error for each in listed):
            raise typer.Exit(1)

    run(look())


@app.command()
def top(
    pattern: Annotated[str, typer.Argument(help="A glob that names match, in quotes: 'gpu-*'.")] = "*",
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Show the resources live: sort, filter, open one. Without a terminal, or with --json, list them once."""
    if as_json or not is_terminal():
        if not as_json:
            print_error(
                "there is no terminal to show the resources live on, so they are listed once, as by `redlease ls`"
            )
        list_resources(pattern, url, prefix, as_json)
        return
    if signal_number := run(show_top(url, prefix, pattern, every)):
        raise typer.Exit(128 + signal_number)


@app.command("run")
def run_command(
    name: Name,
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after `--`.", metavar="-- CMD")],
    *,
    capacity: Annotated[
        int | None,
        typer.Option(min=1, help="Units that may be held at once.", show_default="as declared before, at first 1"),
    ] = None,
    weight: Annotated[int, typer.Option(min=1, help="Units that the command needs.")] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait for the permit.", show_default="forever")
    ] = None,
    priority: Annotated[int, typer.Option(help="From 0 to 100: may pass earlier requests with less.")] = 0,
    lease: Annotated[float, typer.Option(min=1, help="Seconds that the permit stays valid without renewal.")] = 30,
    grace: Annotated[float, typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL if the lease is lost.")] = 5,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
) -> None:
    """Run a command under a permit, and end it if the lease is lost.

    Exits with the command's status; 75: not granted in time, 69: no server, 74: the lease was lost.
    """
    job = Job(command, name, capacity, weight, timeout, priority, lease, grace)
    raise typer.Exit(run(run_job(job, url, prefix), status=2))


@app.command()
def inspect(name: Name, url: Url = LOCAL, prefix: Prefix = "redlease", as_json: AsJson = False) -> None:
    """Show the holders and the waiters of a resource. Exits with 66 if the server knows nothing of that name."""

    async def look() -> bool:
        async with resource_at(name, url, prefix) as resource:
            snapshot = await resource.inspect()
            show(snapshot, as_json=as_json)
            return is_known(snapshot)

    if not run(look()):
        raise typer.Exit(Exit.UNKNOWN)


@app.command()
def history(
    name: Name,
    *,
    count: Annotated[int, typer.Option(min=1, max=HISTORY_MAX, help="How many entries, the newest.")] = 50,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Show what happened to a resource, where a client asks for a history. Exits with 1 if there is none."""

    async def look() -> list[HistoryEntry]:
        async with resource_at(name, url, prefix) as resource:
            return await resource.history(count)

    entries = run(look())
    if not entries:
        kept = f"history of {name!r} under the prefix {prefix!r}"
        print_error(f"there is no {kept}. `history=1000` of a client enables it")
        raise typer.Exit(1)
    show_history(entries, as_json=as_json)


@app.command()
def doctor(url: Url = LOCAL, prefix: Prefix = "redlease", as_json: AsJson = False) -> None:
    """Examine the server and what is kept there. Exits with 0 if all is well, 1 for warnings, 2 for errors."""
    findings = run(examine(url, prefix), status=2)
    show_findings(findings, as_json=as_json)
    raise typer.Exit(max(each.level for each in findings))


@app.command()
def bench(
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long each of the three measurements takes.")] = 1,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Measure locks on your server, on resources of its own: a few seconds of full load, and nothing is left."""
    show_measured(run(measure(url, prefix, seconds)), as_json=as_json)


@app.command()
def watch(name: Name, url: Url = LOCAL, prefix: Prefix = "redlease", as_json: AsJson = False) -> None:
    """Show a resource again each time it changes, until Ctrl-C."""

    async def look() -> None:
        async with resource_at(name, url, prefix) as resource:
            async for snapshot in resource.watch():
                show(snapshot, as_json=as_json)

    run(look())


@app.command()
def release(
    name: Name,
    ticket: Annotated[str | None, typer.Argument(help="Of the holder or waiter to take out.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Release all holders instead of one ticket.")] = False,
    queue: Annotated[bool, typer.Option("--queue", help="With --all: empty the queue first.")] = False,
    yes: Yes = False,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Remove a ticket, as holder or from the queue, and notify its process. Exits with 1 if there was none."""
    if (ticket is None) != every or (queue and not every):
        raise typer.BadParameter("name a ticket, or give --all, with --queue if the waiters are to go too")
    if ticket is None:
        count = run(release_everybody(name, url, prefix, queue=queue, yes=yes))
        show_change(f"{count} released of {plain(name)}.", {"resource": name, "released": count}, as_json=as_json)
        return
    released = run(release_ticket(name, ticket, url, prefix, yes=yes))
    whom, where = plain(ticket), plain(name)
    text = f"{whom} is taken out of {where}." if released else f"{where} has no holder and no waiter {whom}."
    show_change(text, {"resource": name, "ticket": ticket, "released": released}, as_json=as_json)
    if not released:
        raise typer.Exit(1)


@app.command()
def resize(
    name: Name,
    capacity: Annotated[int, typer.Argument(help="Units that may be held at once.")],
    *,
    create: Create = False,
    yes: Yes = False,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Set the capacity of a semaphore, until a process declares a new one. Locks have none to set.

    Exits with 66 if the server knows nothing of that name.
    """
    run(set_capacity(capacity, Target(name, url, prefix, create, yes)))
    text = f"The capacity of {plain(name)} is {capacity} now."
    show_change(text, {"resource": name, "capacity": capacity}, as_json=as_json)


LimitUntil = Annotated[str | None, typer.Option("--until", help="The end: 90s, 30m, 2h, 1d, or 2031-01-31T18:00.")]
Reason = Annotated[str, typer.Option(help="Why, shown by inspect.")]


@app.command("set-limit")
def set_limit(
    name: Name,
    *,
    capacity: Annotated[
        int | None, typer.Option(min=0, help="Units that may be held, of the resource or the key.")
    ] = None,
    per_key: Annotated[int | None, typer.Option(min=0, help="Units that each key may hold.")] = None,
    key: Annotated[str | None, typer.Option(help="Limit this key only.")] = None,
    until: LimitUntil = None,
    reason: Reason = "",
    create: Create = False,
    yes: Yes = False,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Limit a resource or a key of it, whatever processes declare, until that ends or `redlease clear-limit`.

    Exits with 66 if the server knows nothing of that name.
    """
    run(apply_limit(LimitJob(capacity, per_key, key, until, reason), Target(name, url, prefix, create, yes)))
    result: dict[str, object] = {"resource": name, "capacity": capacity, "per_key": per_key, "key": key}
    show_change(f"{plain(name)} is limited.", result, as_json=as_json)


@app.command("clear-limit")
def clear_limit(
    name: Name,
    *,
    key: Annotated[str | None, typer.Option(help="Lift the limit of this key only.")] = None,
    back_off: Annotated[
        bool, typer.Option("--back-off", help="End what back_off has set after a vendor's refusal, and no limit.")
    ] = False,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Lift the limits of a resource, or of a key of it. Exits with 1 if there was none."""
    lifted = run(lift_limits(name, key, url, prefix, back_off=back_off))
    whose = plain(name) if key is None else f"key {plain(key)} of {plain(name)}"
    text = f"The limit of {whose} is lifted." if lifted else f"There is no limit of {whose}."
    show_change(text, {"resource": name, "key": key, "lifted": lifted}, as_json=as_json)
    if not lifted:
        raise typer.Exit(1)


@app.command()
def pause(
    name: Name,
    *,
    until: LimitUntil = None,
    reason: Reason = "",
    create: Create = False,
    yes: Yes = False,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Grant nothing of a resource until that ends or `redlease resume`. Holders go on.

    Exits with 66 if the server knows nothing of that name.
    """
    run(set_pause(until, reason, Target(name, url, prefix, create, yes)))
    show_change(f"{plain(name)} is paused.", {"resource": name, "paused": True}, as_json=as_json)


@app.command()
def resume(name: Name, url: Url = LOCAL, prefix: Prefix = "redlease", as_json: AsJson = False) -> None:
    """End a pause. Exits with 1 if there was none."""
    ended = run(end_pause(name, url, prefix))
    text = f"{plain(name)} is not paused any more." if ended else f"{plain(name)} was not paused."
    show_change(text, {"resource": name, "ended": ended}, as_json=as_json)
    if not ended:
        raise typer.Exit(1)


@app.command()
def web(
    pattern: Annotated[str, typer.Argument(help="A glob that names match, in quotes: 'gpu-*'.")] = "*",
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any that is free.")] = 8420,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name that browsers may use for it, besides localhost.")
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Let those who have the token release and resize.")
    ] = False,
    url: Url = LOCAL,
    prefix: Prefix = "redlease",
    as_json: AsJson = False,
) -> None:
    """Show the resources live on a web page, until Ctrl-C. Needs redlease[web]."""
    serve_view(
        url=url,
        prefix=prefix,
        pattern=pattern,
        host=host,
        port=port,
        hosts=allow_host or [],
        allow_changes=allow_changes,
        as_json=as_json,
    )
