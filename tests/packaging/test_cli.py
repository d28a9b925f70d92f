"""The command: the demo as people and machines run it, its judgement on made-up runs, and the small commands."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

import redlease
from redlease import Permit, Redlease, Snapshot, Waiter
from redlease._cli import main
from redlease._cli.demo.evidence import Evidence, Kill, Sighting, Turn
from redlease._cli.demo.run import Demo, Notice, without_secrets
from redlease._cli.demo.screen import Screen, summary
from redlease._cli.demo.timeline import draw
from redlease._cli.demo.verdict import ALLOWANCE, Verdict, judge
from redlease._cli.snapshot import lines_of
from redlease._cli.statuses import Exit

from command_line import COMMAND, HARMLESS, HOSTILE, run, run_async, seen_on_terminal
from helpers import cancel, eventually, queue_up

if TYPE_CHECKING:
    from conftest import Servers

# A whole demo takes a busy machine some time.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def url(servers: Servers) -> str:
    """A server for commands that are given one."""
    return servers["valkey9"].url


# The demo as a whole


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the timeline of one run on an embedded server."""
    directory = tmp_path_factory.mktemp("demo")
    done = run("demo", "--json", "--rounds", "10", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), (directory / "redlease-demo.html").read_text()


def test_the_version() -> None:
    """`redlease --version` names the package's."""
    shown = run("--version")
    assert (shown.returncode, shown.stdout) == (0, f"redlease {redlease.__version__}\n")


@pytest.mark.slow
def test_the_demo_keeps_its_promises(demo: tuple[dict[str, Any], str]) -> None:
    """At most 3 inside, grants in arrival order, fences increasing, both kills recovered within the lease."""
    told, _ = demo
    assert told["promises_kept"] is True
    assert (told["consumers"], told["capacity"], told["most_inside"], told["most_permits"]) == (8, 3, 3, 3)
    assert told["in_arrival_order"]
    assert told["fences_increasing"]
    assert told["all_served"]
    assert [kill["what"] for kill in told["kills"]] == ["holder", "waiter"]
    assert all(
        kill["recovered_within_lease"] and 0 < kill["seconds_lost"] <= kill["lease"] + ALLOWANCE
        for kill in told["kills"]
    )
    assert 60 <= told["grants"] <= 80


@pytest.mark.slow
def test_the_timeline_needs_nothing_from_elsewhere(demo: tuple[dict[str, Any], str]) -> None:
    """One file: no script, no style sheet, no font and no picture is loaded."""
    told, page = demo
    assert not re.search(r"https?:|src=|href=|@import|url\((?!#)|<script|<link", page)
    for number in range(1, 9):
        assert f"consumer {number}" in page
    assert page.count('class="holding"') == told["grants"]
    assert page.count('class="kill-cross"') == 2
    assert "8 processes share 3 permits" in page
    assert "capacity 3" in page
    assert "seconds since the start" in page


@pytest.mark.slow
def test_the_demo_prints_plain_lines_where_no_terminal_is(tmp_path: Path, url: str) -> None:
    """In CI there is no terminal: lines of progress and the summary, on a server that is given; and a picture."""
    timeline = tmp_path / "run.svg"
    done = run("demo", "--url", url, "--rounds", "6", "--timeline", str(timeline))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b[" not in done.stdout
    assert re.search(r"s  3 of 3 held, \d waiting, \d+ grants, last fence \d{16}", done.stdout)
    assert len(re.findall(r"kill -9 \d+: consumer \d, while it (held|waited)", done.stdout)) == 2
    assert "✓  at most 3 inside at any moment" in done.stdout
    assert "✗" not in done.stdout
    assert ET.parse(timeline).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.slow
def test_the_demo_draws_a_live_table_on_a_terminal(tmp_path: Path) -> None:
    """Holders, waiters in order and fences, and the killed ones among them."""
    text = seen_on_terminal("demo", "--rounds", "6", "--timeline", str(tmp_path / "run.html"), columns=100)
    assert re.search(r"● holds +consumer \d +\d/\d +1 +\d{16} +\d\.\d s +\d", text)
    assert re.search(r"● waits 1 +consumer \d +\d/\d +1 +\d\.\d s +\d", text)
    assert re.search(r"● killed, holds +consumer \d +\d/\d +1 +\d{16}", text)
    assert len(set(re.findall(r"● killed\S*(?: \w+(?: \d)?)? +(consumer \d)", text))) == 2
    assert re.search(r"● done +consumer", text)
    assert "✓  granted in the order of arrival" in text


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_and_every_process_of_it(tmp_path: Path) -> None:
    """An interrupt leaves neither a consumer nor a server behind."""
    demo = subprocess.Popen([*COMMAND, "demo"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    assert "8 processes" in demo.stdout.readline()
    children = descendants(demo.pid)
    assert len(children) >= 9  # eight consumers and a server
    demo.send_signal(signal.SIGINT)
    assert demo.wait(timeout=10) == 130
    demo.stdout.close()
    deadline = time.monotonic() + 5
    while left := [pid for pid in children if runs(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_demo_takes_its_consumers_along(tmp_path: Path) -> None:
    """A consumer ends when its input does, however its parent came to its end."""
    demo = subprocess.Popen([*COMMAND, "demo"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    demo.stdout.readline()
    children = descendants(demo.pid)
    demo.kill()
    demo.wait()
    demo.stdout.close()
    deadline = time.monotonic() + 10
    while left := [pid for pid in children if runs(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    found, parents = [pid], {child: its_parent for child, (its_parent, _) in processes().items()}
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def runs(pid: int) -> bool:
    """Tell whether a process is alive and no zombie."""
    return processes().get(pid, (0, "Z"))[1] != "Z"


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of every process, from /proc or, where there is none, from ps."""
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True
        ).stdout
        return {int(pid): (int(parent), state[0]) for pid, parent, state in map(str.split, listed.splitlines())}
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            found[int(stat.parent.name)] = (int(parent), state)
    return found


# The judgement, on made-up runs


def turn(ticket: str, asked: float, entered: float, left: float | None, fence: int) -> Turn:
    """Return a turn that was granted; the server's clock is the run's in ms."""
    return Turn(f"consumer {ticket[0]}", ticket, asked, entered, left, fence, int(entered * 1000))


def good_run() -> Evidence:
    """Return a run of capacity 1 in which a holder and a waiter were killed and all went well."""
    evidence = Evidence("made-up", capacity=1, rounds=1)
    turns = [
        turn("1/1", 0.0, 0.1, 0.5, 11),
        turn("2/1", 0.2, 0.5, None, 12),  # killed at 0.6, its lease ends at 2.4
        turn("4/1", 0.4, 4.0, 5.0, 15),
        turn("5/1", 0.45, 5.0, 6.0, 16),
        Turn("consumer 3", "3/1", 0.3),  # killed at 2.0, its place lapses at 3.9
    ]
    evidence.turns = {one.ticket: one for one in turns}
    evidence.sightings = [
        Sighting(0.48, ["1/1"], ["2/1", "3/1", "4/1", "5/1"], [200, 300, 400, 450]),
        Sighting(1.0, ["2/1"], ["3/1", "4/1", "5/1"], [300, 400, 450]),
        Sighting(2.41, ["3/1"], ["4/1", "5/1"], [400, 450]),
        Sighting(3.95, ["4/1"], ["5/1"], [450]),
    ]
    holder = Kill("holder", "consumer 2", "2/1", 0.6, 2.0, holds_from=0.6, holds_until=2.4, gone_at=2.41)
    waiter = Kill("waiter", "consumer 3", "3/1", 2.0, 2.0, holds_from=2.41, holds_until=3.9, gone_at=3.95)
    evidence.kills, evidence.ended_at = [holder, waiter], 6.0
    return evidence


def test_a_good_run_is_found_good() -> None:
    """A run in which everything went as promised is judged so."""
    verdict = judge(good_run())
    assert verdict.promises_kept, verdict
    assert (verdict.grants, verdict.most_inside) == (4, 1)
    assert [kill.seconds_lost for kill in verdict.kills] == [1.81, 2.0]


def broken(verdict: Verdict) -> set[str]:
    """Return the names of what the verdict finds broken."""
    whole = {"in_arrival_order": True, "fences_increasing": True, "all_served": True}
    found = {name for name, good in whole.items() if getattr(verdict, name) != good}
    found |= {f"{kill.what} not recovered" for kill in verdict.kills if not kill.recovered_within_lease}
    if max(verdict.most_inside, verdict.most_permits) > verdict.capacity:
        found.add("too many")
    assert verdict.promises_kept == (not found and len(verdict.kills) == 2 and not verdict.failures)
    return found


def test_two_inside_are_found() -> None:
    """One who enters while another is inside breaks the exclusion."""
    evidence = good_run()
    evidence.turns["5/1"].entered_at = 4.9
    assert "too many" in broken(judge(evidence))


def test_a_killed_holder_is_inside_until_its_lease_ends() -> None:
    """Who enters before the lease of a dead holder has ended is one too many."""
    evidence = good_run()
    evidence.kills[0].holds_until = 4.01
    assert broken(judge(evidence)) == {"too many"}


def test_a_permit_too_many_on_the_server_is_found() -> None:
    """The server may not show more permits than fit, whatever the consumers tell."""
    evidence = good_run()
    evidence.sightings[1].holders.append("9/1")
    assert broken(judge(evidence)) == {"too many"}


def test_a_waiter_passed_by_another_is_found() -> None:
    """Grants that do not follow the order of the queue."""
    evidence = good_run()
    first, second = evidence.turns["4/1"], evidence.turns["5/1"]
    first.fence, second.fence = second.fence, first.fence
    first.granted_at_ms, second.granted_at_ms = second.granted_at_ms, first.granted_at_ms
    assert broken(judge(evidence)) == {"in_arrival_order"}


def test_a_newcomer_that_passes_the_queue_is_found() -> None:
    """Who asks after others were seen to wait is granted after them."""
    evidence = good_run()
    evidence.turns["6/1"] = turn("6/1", 1.2, 2.45, 3.0, 14)
    assert broken(judge(evidence)) == {"in_arrival_order"}


def test_a_queue_out_of_the_order_of_its_times_is_found() -> None:
    """The server's own record of arrival orders its queue."""
    evidence = good_run()
    evidence.sightings[0].queued_at_ms[1] = 100
    assert broken(judge(evidence)) == {"in_arrival_order"}


def test_a_fence_that_goes_back_is_found() -> None:
    """A later grant with a smaller fence."""
    evidence = good_run()
    evidence.sightings.clear()
    evidence.turns["5/1"].fence = 13
    assert broken(judge(evidence)) == {"fences_increasing"}


def test_a_fence_given_twice_is_found() -> None:
    """Two grants with one fence."""
    evidence = good_run()
    evidence.turns["2/1"].fence = 11
    assert broken(judge(evidence)) == {"fences_increasing"}


@pytest.mark.parametrize("gone_at", [4.7, None])
def test_a_kill_that_is_not_recovered_is_found(gone_at: float | None) -> None:
    """A dead waiter in the way for longer than its lease, or for ever."""
    evidence = good_run()
    evidence.kills[1].gone_at = gone_at
    assert broken(judge(evidence)) == {"waiter not recovered"}


def test_capacity_that_stays_idle_after_a_kill_is_found() -> None:
    """It is not enough that the server forgets the dead: the living must get what it had."""
    evidence = good_run()
    evidence.turns["4/1"].entered_at, evidence.turns["4/1"].granted_at_ms = 4.7, 4700
    assert broken(judge(evidence)) == {"waiter not recovered"}
    evidence.kills[1].holds_from = evidence.kills[1].holds_until = None
    assert broken(judge(evidence)) == {"holder not recovered", "waiter not recovered"}


def test_a_run_without_its_kills_shows_nothing() -> None:
    """A run in which the waiter was not killed cannot keep the promise about it."""
    evidence = good_run()
    evidence.kills.pop()
    evidence.turns.pop("3/1")
    evidence.turns["4/1"] = turn("4/1", 0.4, 2.42, 5.0, 15)
    verdict = judge(evidence)
    assert broken(verdict) == set()
    assert not verdict.promises_kept


def test_a_consumer_that_was_never_served_is_found() -> None:
    """Everybody who lives gets in, and tells that it has left."""
    evidence = good_run()
    evidence.turns["7/1"] = Turn("consumer 7", "7/1", 5.5)
    assert broken(judge(evidence)) == {"all_served"}


def test_a_consumer_that_failed_breaks_the_run() -> None:
    """An error in a consumer is no success, and the page shows it."""
    evidence = good_run()
    evidence.failures.append("consumer 8 ended with status 1: Unavailable")
    verdict = judge(evidence)
    assert not verdict.promises_kept
    assert "consumer 8 ended with status 1" in draw(evidence, verdict)


def test_what_a_consumer_complained_of_is_shown_letter_for_letter() -> None:
    """The summary, the live table and the page neither read markup nor pass control characters on."""
    evidence = good_run()
    evidence.failures.append(HOSTILE)
    verdict = judge(evidence)
    demo = Demo(None, rounds=1, on_notice=lambda _: None)
    demo.evidence = evidence
    demo.snapshot = Snapshot("r", 1, (Permit("r", HOSTILE, 7, 1, 1, 2000, 0, 2000, HOSTILE),), (), 7, 1000)
    screen = Screen()
    screen.demo, screen.notices = demo, [Notice(1.0, "kill", HOSTILE)]
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(summary(verdict), screen)
    shown = console.export_text()
    assert shown.count(HARMLESS) == 4  # the failure, the notice, an owner and its ticket
    assert HOSTILE not in shown
    assert escape(HARMLESS) in draw(evidence, verdict)


def test_a_broken_promise_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status and the JSON tell of a broken promise, and the timeline is written all the same."""

    async def run_badly(self: object) -> Evidence:
        evidence = good_run()
        evidence.turns["5/1"].entered_at = 4.9
        return evidence

    monkeypatch.setattr("redlease._cli.demo.run.Demo.run", run_badly)
    monkeypatch.setattr(sys, "argv", ["redlease", "demo", "--json", "--timeline", str(tmp_path / "bad.html")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["promises_kept"], told["most_inside"]) == (False, 2)
    assert "A promise was broken." in (tmp_path / "bad.html").read_text()


# The small commands


async def test_inspect_shows_holders_and_waiters(url: str, prefix: str) -> None:
    """A table for people, in which everybody is named."""
    async with Redlease.from_url(url, prefix=prefix, owner="svc-a") as client:
        gpu = client.semaphore("gpu", capacity=2)
        permit = await gpu.acquire(ticket="first", weight=2, metadata={"job": "train"})
        waiting = asyncio.create_task(gpu.acquire(ticket="second", owner="svc-b"))
        await eventually(lambda: waiters_of(client, "gpu"))
        done = await run_async("inspect", "gpu", "--url", url, "--prefix", prefix)
        assert done.returncode == 0, done.stderr
        assert f"gpu: 2 of 2 held, 1 waiting, last fence {permit.fence}" in done.stdout
        assert re.search(rf"holds +first +svc-a +2 +{permit.fence} .* job=train", done.stdout)
        assert re.search(r"waits 1 +second +svc-b +1 ", done.stdout)
        await gpu.release(permit)
        await gpu.release(await waiting)


async def waiters_of(client: Redlease, name: str) -> bool:
    """Tell whether somebody waits for a resource."""
    return bool((await client.semaphore(name, capacity=2).inspect()).waiters)


async def test_inspect_prints_json(url: str, prefix: str) -> None:
    """One line of JSON with the fields of a snapshot."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        permit = await client.lock("invoice").acquire()
        done = await run_async("inspect", "invoice", "--json", "--url", url, "--prefix", prefix)
        told = json.loads(done.stdout)
        assert told["holders"][0]["fence"] == permit.fence == told["fence"]
        assert told["waiters"] == []
        await client.lock("invoice").release(permit)


async def test_a_table_that_fits_has_the_metadata_below_each_row(url: str, prefix: str) -> None:
    """On a terminal of 80 columns: a line for each, and another for what it said about itself."""
    async with Redlease.from_url(url, prefix=prefix, owner="svc-a") as client:
        gpu = client.semaphore("gpu", capacity=2)
        permit = await gpu.acquire(ticket="first", weight=2, metadata={"job": "train", "region": "eu-central-1"})
        (waiting,) = await queue_up(gpu, 1, ticket="second")
        place = ("inspect", "gpu", "--url", url, "--prefix", prefix)
        shown = await asyncio.to_thread(seen_on_terminal, *place, columns=80)
        assert re.fullmatch(
            rf"gpu: 2 of 2 held, 1 waiting, last fence {permit.fence}\n\n"
            r" +ticket +owner +weight +fence +for +lease left\n"
            rf"holds +first +svc-a +2 +{permit.fence} +\d+\.\d s +\d+\.\d s\n"
            r" +job=train  region=eu-central-1\n"
            r"waits 1 +second +svc-a +1 +- +\d+\.\d s +-\n\n",
            shown,
        ), shown
        await gpu.release(permit)
        await gpu.release(await waiting)


LONG = (
    Permit(
        "gpu", "order-4711/" + "x" * 40, 1795294679434039, 2, 3, 30_000, 0, 30_000, "train-worker-7f9c5b4d9-x2x4z:1"
    ),
    Permit(
        "gpu", "t" * 256, 1795294679434040, 1, 3, 30_000, 0, 30_000, "o" * 90, {"job": "train", "region": "eu " * 20}
    ),
)
QUEUED = Waiter("w" * 70, 1, "train-worker-7f9c5b4d9-x2x4z:2", {"job": "a b", "note": "n" * 300, "region": "eu"}, 0)
CROWD = Snapshot("gpu", 3, LONG, (QUEUED,), LONG[1].fence, 12_000)


@pytest.mark.parametrize("width", [80, 120])
def test_no_word_is_broken_on_a_terminal(width: int) -> None:
    """What does not fit goes to the next line whole, and only what is longer than a line is left to the terminal."""
    lines = [line.plain for line in lines_of(CROWD, width)]
    pairs = [f"{key}={value}" for one in (LONG[1], QUEUED) for key, value in one.metadata.items()]
    whole = [text for one in (*LONG, QUEUED) for text in (one.ticket, one.owner)] + pairs
    for text in [*whole, f"fence {LONG[0].fence}", "for 12.0 s", "lease left 18.0 s", "waits 1"]:
        assert any(text in line for line in lines), text
    for line in lines:
        assert len(line) <= width or line.strip().removeprefix("holds    ").removeprefix("waits 1  ") in whole, line
    assert not [line for line in lines if "fence " in line and "job=" in line]


def test_everybody_has_one_line_where_no_terminal_is() -> None:
    """The head, the names of the columns, and a line each with all of it, which awk splits at two spaces."""
    head, _, names, *rows, _ = (line.plain for line in lines_of(CROWD, None))
    assert head == f"gpu: 3 of 3 held, 1 waiting, last fence {LONG[1].fence}"
    columns = ["ticket", "owner", "weight", "fence", "for", "lease left"]
    assert re.split(" {2,}", names.strip()) == [*columns, "metadata"]
    numbers = ["2", str(LONG[0].fence), "12.0 s", "18.0 s"]
    assert re.split(" {2,}", rows[0]) == ["holds", LONG[0].ticket, LONG[0].owner, *numbers]
    pairs = ["job=a b", "note=" + "n" * 300, "region=eu"]
    assert re.split(" {2,}", rows[2]) == ["waits 1", QUEUED.ticket, QUEUED.owner, "1", "-", "12.0 s", "-", *pairs]
    assert len(rows) == 3


@pytest.mark.slow
async def test_what_a_holder_wrote_is_shown_letter_for_letter(url: str, prefix: str) -> None:
    """Brackets and colons are no markup, and what a terminal would obey is shown as an escape, on one line."""
    async with Redlease.from_url(url, prefix=prefix, owner="svc:cat:a") as client:
        permit = await client.lock(HOSTILE).acquire(ticket=HOSTILE, metadata={"[i]job": HOSTILE})
        done = await run_async("inspect", HOSTILE, "--url", url, "--prefix", prefix)
        assert done.returncode == 0, done.stderr
        head, _, _, row = done.stdout.rstrip("\n").split("\n")
        assert head.startswith(f"{HARMLESS}: 1 of 1 held")
        assert f" {HARMLESS}  svc:cat:a " in row
        assert f"[i]job={HARMLESS}" in row
        done = await run_async("inspect", HOSTILE, "--json", "--url", url, "--prefix", prefix)
        assert json.loads(done.stdout)["holders"][0] == asdict(permit)
        done = await run_async("release", HOSTILE, HOSTILE, "--url", url, "--prefix", prefix)
        assert done.stdout == f"{HARMLESS} is taken out of {HARMLESS}.\n"


async def test_watch_shows_what_a_holder_wrote_letter_for_letter(url: str, prefix: str) -> None:
    """A ticket that looks like markup does not end the watch."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        permit = await client.lock("invoice").acquire(ticket=HOSTILE)
        watching = await asyncio.create_subprocess_exec(
            *COMMAND, "watch", "invoice", "--url", url, "--prefix", prefix, stdout=asyncio.subprocess.PIPE
        )
        assert watching.stdout is not None
        while HARMLESS not in (line := (await watching.stdout.readline()).decode()):
            assert line, "it has ended"
        await client.lock("invoice").release(permit)
        while "0 of 1 held" not in (line := (await watching.stdout.readline()).decode()):
            assert line, "it has ended"
    watching.send_signal(signal.SIGINT)
    assert await watching.wait() == 130


async def test_inspect_counts_what_it_does_not_list(url: str, prefix: str) -> None:
    """A snapshot lists a thousand holders and as many waiters; where there are more, the head counts them all."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        gpu = client.semaphore("gpu", capacity=1001)
        await asyncio.gather(*(gpu.acquire() for _ in range(1001)))
        waiting = [asyncio.create_task(gpu.acquire()) for _ in range(1001)]

        async def all_wait() -> bool:
            return (await gpu.inspect(max_items=1)).waiting == 1001

        await eventually(all_wait)
        place = ("inspect", "gpu", "--url", url, "--prefix", prefix)
        head, _, _ = (await run_async(*place)).stdout.partition("\n")
        assert head.startswith("gpu: 1001 of 1001 held, 1001 waiting, last fence ")
        assert head.endswith("; the first 1000 of each are listed")
        await cancel(*waiting)
        await gpu.release_all(queue=True)
        done = await run_async(*place)
        assert done.stdout.startswith("gpu: 0 of 1001 held, 0 waiting, last fence "), done.stdout


@pytest.mark.slow
async def test_inspect_invents_nothing_of_a_name_never_used(url: str, prefix: str) -> None:
    """Without a capacity on the server none is shown, and once there is one, nobody need have acquired."""
    place = ("--url", url, "--prefix", prefix)
    done = await run_async("inspect", "never", *place)
    assert done.returncode == Exit.UNKNOWN
    assert done.stdout.startswith("never: nothing is known of it"), done.stderr
    done = await run_async("inspect", "never", "--json", *place)
    assert done.returncode == Exit.UNKNOWN
    assert json.loads(done.stdout)["capacity"] is None
    await run_async("resize", "never", "2", "--create", *place)
    done = await run_async("inspect", "never", *place)
    assert done.stdout == "never: 0 of 2 held, 0 waiting, last fence unknown\n"


async def test_release_takes_a_ticket_out(url: str, prefix: str) -> None:
    """A holder is taken out once; the second time nobody is there, and the exit status says so."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("invoice").acquire(ticket="stuck")
        first = await run_async("release", "invoice", "stuck", "--url", url, "--prefix", prefix)
        second = await run_async("release", "invoice", "stuck", "--url", url, "--prefix", prefix)
        assert (first.returncode, second.returncode) == (0, 1), first.stderr + second.stderr
        assert not await client.lock("invoice").locked()


async def test_resize_sets_the_capacity(url: str, prefix: str) -> None:
    """The new capacity holds for those who wait already."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        gpu = client.semaphore("gpu", capacity=2)
        permit = await gpu.acquire(weight=2)
        waiting = asyncio.create_task(gpu.acquire())
        await eventually(lambda: waiters_of(client, "gpu"))
        done = await run_async("resize", "gpu", "3", "--url", url, "--prefix", prefix)
        assert done.returncode == 0, done.stderr
        assert (await asyncio.wait_for(waiting, 15)).capacity == 3
        await gpu.release(permit)


@pytest.mark.slow
async def test_limits_are_set_shown_and_lifted(url: str, prefix: str) -> None:
    """What an operator limits or pauses counts at once, is shown with who and why, and is lifted once."""
    place = ("--url", url, "--prefix", prefix)
    async with Redlease.from_url(url, prefix=prefix) as client:
        gpu = client.semaphore("gpu", capacity=3)
        await gpu.acquire()
        done = await run_async(
            "set-limit", "gpu", "--capacity", "1", "--until", "2h", "--reason", "driver update", *place
        )
        assert (done.returncode, done.stdout) == (0, "gpu is limited.\n"), done.stderr
        assert await gpu.try_acquire() is None
        shown = (await run_async("inspect", "gpu", *place)).stdout
        assert re.search(r"limit by \S+, for 7\d\d\d(\.\d+)? s more: .* at most 1: driver update", shown), shown
        assert "1 of 3, limit 1" in (await run_async("ls", *place)).stdout
        assert (await run_async("set-limit", "gpu", "--capacity", "2", "--key", "acme", *place)).returncode == 0
        assert (await run_async("pause", "gpu", *place)).returncode == 0
        assert "paused" in (await run_async("ls", *place)).stdout
        for command, status in (("resume", 0), ("resume", 1), ("clear-limit", 0), ("clear-limit", 1)):
            assert (await run_async(command, "gpu", *place)).returncode == status, command
        assert [limit.key for limit in (await gpu.inspect()).limits] == ["acme"]
        assert (await run_async("clear-limit", "gpu", "--key", "acme", *place)).returncode == 0
        assert await gpu.try_acquire() is not None
        wrong = await run_async("set-limit", "gpu", "--capacity", "1", "--until", "soon", *place)
        assert wrong.returncode == 1
        assert "--until is a duration as 90s" in wrong.stderr
        assert (await gpu.inspect()).limits == ()


async def test_watch_shows_each_change(url: str, prefix: str) -> None:
    """A line of JSON at once and one for each change, until it is interrupted."""
    arguments = ("watch", "invoice", "--json", "--url", url, "--prefix", prefix)
    watching = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=asyncio.subprocess.PIPE)
    assert watching.stdout is not None
    assert json.loads(await watching.stdout.readline())["holders"] == []
    async with Redlease.from_url(url, prefix=prefix) as client:
        permit = await client.lock("invoice").acquire()
        assert json.loads(await watching.stdout.readline())["holders"][0]["ticket"] == permit.ticket
        await client.lock("invoice").release(permit)
        assert json.loads(await watching.stdout.readline())["holders"] == []
    watching.send_signal(signal.SIGINT)
    assert await watching.wait() == 130


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "shown"),
    [("redis://127.0.0.1:1/0", "127.0.0.1:1"), ("unix:///nobody\x1b[2J.sock", r"/nobody\x1b[2J.sock")],
)
def test_what_goes_wrong_is_told_in_one_line(address: str, shown: str) -> None:
    """A server that is not there: no traceback, what to do, and nothing that a terminal would obey."""
    done = run("inspect", "invoice", "--url", address)
    assert done.returncode == Exit.UNAVAILABLE
    assert done.stdout == ""
    assert done.stderr.startswith("redlease: ")
    assert done.stderr.count("\n") == 1
    assert shown in done.stderr


async def test_a_demo_that_can_start_no_process(url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the way is told, and nothing else that goes wrong for it."""

    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr("asyncio.create_subprocess_exec", fail)
    with pytest.raises(OSError, match="too many open files"):
        await Demo(url, rounds=1, prefix=prefix, on_notice=lambda _: None).run()


def test_without_the_extra_the_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without typer or rich there is one line that says what to install."""
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "redlease._cli.app", raising=False)
    with pytest.raises(SystemExit, match=re.escape("pip install 'redlease[cli]'")):
        main()


def test_no_password_is_shown() -> None:
    """What is printed of a URL leaves out who logs in."""
    assert without_secrets("rediss://me:secret@host:6380/1") == "rediss://host:6380/1"
