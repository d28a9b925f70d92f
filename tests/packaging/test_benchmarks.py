"""The benchmarks run, each at a tiny size, and what an operation costs in things that can be counted has not grown."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Redlease

import breakdown
import counts
import report
import scaling_out
import worst
from counts import TABLE
from filling import Filling
from fleet import FLEET
from growth import GROWTH
from peers import PEERS
from server import any_binary, running_server
from trial import EVERY_WORKLOAD, TrialFailed, try_out
from workloads import SCALING, WORKLOADS, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INSTALLED = [key for key, peer in PEERS.items() if peer.is_installed()]

# What each workload is given here instead of its usual size.
TINY: dict[str, dict[str, Any]] = {
    "w1": {"seconds": 0.05},
    "w1same": {"seconds": 0.05},
    "w2": {"seconds": 0.05, "tasks": 20},
    "w2same": {"seconds": 0.05, "tasks": 20},
    "w3": {"waiters": 4, "turns": 5},
    "w3many": {"waiters": 8, "turns": 5, "locks": 2},
    "w4c1": {"waiters": 10},
    "w4c8": {"waiters": 20},
    "w5": {"waiters": 10, "seconds": 0.5, "settle_s": 0.3},
    "w6": {"leases": 10, "seconds": 1.5, "settle_s": 0.2},
    "holds": {"leases": 10, "seconds": 1.5, "settle_s": 0.2},
    "tasks8": {"seconds": 0.05},
    "queue100": {"grants": 200},
    "capacity100": {"grants": 200},
    "memory": {"waiters": 500},
    "bare": {"waiters": 500},
    "names": {"names": 200},
    "fleet": {"processes": 2, "tasks": 4, "seconds": 0.3},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server for these tests alone."""
    with running_server(any_binary()) as url:
        yield url


def fitting() -> list[Any]:
    """Every workload with every library that can do it and is installed."""
    return [
        pytest.param(workload, peer, id=f"{workload}-{peer}")
        for workload in TINY
        for peer in INSTALLED
        if EVERY_WORKLOAD[workload].fits(PEERS[peer])
        and (peer == "redlease" or (workload in WORKLOADS and (peer == "floor" or workload in {"w1", "w4c8", "w5"})))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "peer"), fitting())
def test_a_workload_gives_sane_numbers(url: str, workload: str, peer: str) -> None:
    """Each workload ends with the figures that the tables show, all of them numbers that can be."""
    outcome = try_out(peer, workload, url, **TINY[workload])
    assert outcome.figures.keys() <= report.COLUMNS.keys() | {"server_us_grant", "client_us_grant", "keys_most"}
    assert all(math.isfinite(value) and value >= 0 for value in outcome.figures.values())
    assert outcome.percentiles_us == sorted(outcome.percentiles_us)
    if peer == "redlease":
        check_of_redlease(workload, outcome.figures)


def check_of_redlease(workload: str, figures: dict[str, float]) -> None:
    """What holds of this library at any size and on any machine."""
    assert figures.get("connections", 1) == 1
    assert figures.get("inverted_pct", 0) == figures.get("retaken_pct", 0) == figures.get("lost", 0) == 0
    assert figures.get("keys_left", 0) == 0
    assert figures.get("makespan_x", 1) >= 1
    assert 0 < figures.get("p50_us", 1) <= figures.get("p99_us", 1)
    if workload == "memory":
        assert 500 < figures["waiter_bytes"] < 20_000


def test_a_library_that_fails_says_why(url: str) -> None:
    """A trial that ends with an error is told with what its process said last."""
    with pytest.raises(TrialFailed, match=r"(?s)^w1 with redlease: .*ValueError"):
        try_out("redlease", "w1", url, tasks=1, seconds=0.0)


def test_every_workload_is_tried_here() -> None:
    """A new workload needs a tiny size; those that differ in one number need only one."""
    series = {key for keys, _ in report.SERIES.values() for key in keys} - {"memory", "bare"}
    assert (
        TINY.keys() | series
        == EVERY_WORKLOAD.keys()
        == WORKLOADS.keys() | SCALING.keys() | GROWTH.keys() | FLEET.keys()
    )


@pytest.mark.slow
def test_counts_have_not_grown(url: str) -> None:
    """No operation costs more round trips, commands, messages, calls or Lua than the table in counts.json allows.

    Whoever makes one dearer on purpose changes the table: `make bench-quick ARGS=--write`. With OpenTelemetry on, a
    pair makes at most 15 % more calls outside of a recorded trace, and asks nothing more of the server inside of one.
    """
    found: dict[str, counts.Counts] = {}
    # In a thread, so that neither the tests' loop nor what measures their coverage is counted.
    thread = threading.Thread(target=lambda: found.update(asyncio.run(counts.count_all(url))))
    thread.start()
    thread.join()
    allowed = json.loads(TABLE.read_text())
    assert found.keys() == allowed.keys()
    assert not counts.too_many(found, allowed)
    assert found["observed pair"]["python_calls"] <= 1.15 * found["pair"]["python_calls"]
    assert found["traced pair"]["commands"] == found["pair"]["commands"]


def test_a_dearer_operation_is_noticed() -> None:
    """A count above the table's is told; what varies with the version of Python may be a little above."""
    allowed = {"pair": {"commands": 15.0, "python_calls": 300.0}}
    assert not counts.too_many({"pair": {"commands": 15.0, "python_calls": 330.0}}, allowed)
    (told,) = counts.too_many({"pair": {"commands": 15.5, "python_calls": 300.0}}, allowed)
    assert told == "pair: 15.5 commands, where counts.json has 15"
    assert counts.too_many({"pair": {"commands": 15.0, "python_calls": 400.0}}, allowed)


def test_the_layers_of_the_server_add_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script costs more than a bare command, and one that runs our commands more than one that does nothing."""
    monkeypatch.setattr(breakdown, "BATCHES", 30)
    bare, nothing, commands = (us for _, us in breakdown.server_layers(url))
    assert 0 < bare < nothing < commands


@pytest.mark.slow
def test_the_files_of_the_client_share_its_time(url: str) -> None:
    """The samples find this library's own files, and make up the whole."""
    shares, outcome = asyncio.run(breakdown.client_shares(url, seconds=1.5))
    assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert "redlease/_core/transport/connection.py" in dict(shares)
    assert outcome.figures["client_us_pair"] > 0


@pytest.mark.slow
def test_masters_share_keys_and_load() -> None:
    """Each of three masters has its part of 200 names and of the work on them, and its CPU time is read."""
    with scaling_out.cluster(any_binary(), 3) as (url, masters):
        done = asyncio.run(scaling_out.work(url, masters, fresh=False, tasks=200, seconds=0.4))
    assert sum(share.pairs for share in done.masters) == pytest.approx(1)
    assert sum(share.keys for share in done.masters) == pytest.approx(1)
    for share in done.masters:
        assert 0.15 < share.keys < 0.55
        assert 0.15 < share.pairs < 0.55
        assert share.server_us > 0


@pytest.mark.slow
@pytest.mark.parametrize("state", worst.STATES, ids=lambda state: state.__name__)
def test_the_worst_calls_are_bounded(state: Callable[[worst.Bench], None]) -> None:
    """With a fiftieth of the waiters each state is as bad, since no script runs more than some hundred commands."""
    with running_server(any_binary()) as url, contextlib.closing(Filling(url)) as filling:
        bench = worst.Bench(filling, 0.02)
        state(bench)
    assert bench.found
    assert {each.operation: each.commands for each in bench.found if each.commands > 450} == {}


@pytest.mark.slow
def test_a_tenant_is_measured_beside_an_attack() -> None:
    """`make bench-tenants` with one attack prints what the honest tenant waits for, and what the server does."""
    command = [sys.executable, str(BENCHMARKS / "tenants.py"), "rates", "--seconds", "0.5"]
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    program = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=env)
    assert program.returncode == 0, program.stderr
    (line,) = [line for line in program.stdout.splitlines() if "rates" in line]
    assert len(line.split()) == 10


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    command = [sys.executable, str(BENCHMARKS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.slow
def test_the_program_prints_a_table_for_a_page() -> None:
    """`make bench` with one workload and one round prints a Markdown table with ratios to the floor."""
    command = ("w3", "--rounds", "1", "--peers", "floor", "redlease", "--markdown", "--server", str(any_binary()))
    program = ended(*command)
    assert program.returncode == 0, program.stderr
    lines = [line for line in program.stdout.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| floor", "| redlease"]
    assert "(" in lines[3]
    assert "(" not in lines[2]


@pytest.mark.slow
def test_the_program_measures_an_earlier_version_beside_this_one() -> None:
    """`--before` builds the library as a commit has it, and each is measured with its own code."""
    chosen = ("w1", "--rounds", "1", "--peers", "redlease", "--before", "HEAD")
    program = ended(*chosen, "--markdown", "--server", str(any_binary()))
    assert program.returncode == 0, program.stderr
    lines = [line for line in program.stdout.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| redlease", "| redlease before"]


def test_the_program_refuses_what_it_does_not_know() -> None:
    """A misspelt workload is told before anything is measured."""
    program = ended("w9")
    assert program.returncode == 2
    assert "there is no workload w9" in program.stderr


def result(**figures: float) -> dict[str, list[Outcome]]:
    """One round of the floor and of this library."""
    return {
        "floor": [Outcome({name: value / 2 for name, value in figures.items()}, [float(n) for n in range(1, 102)])],
        "redlease": [Outcome(dict(figures), [2.0 * n for n in range(1, 102)])],
    }


def test_ratios_are_those_of_rounds() -> None:
    """A ratio is the median of those in each round, so that a slow round of both does not count."""
    mine = [Outcome({"pairs_s": value}) for value in (10.0, 1.0, 12.0)]
    its = [Outcome({"pairs_s": value}) for value in (20.0, 2.0, 20.0)]
    assert report.of_floor(mine, its, "pairs_s") == 0.5
    assert report.median(mine, "pairs_s") == 10.0
    assert report.of_floor(mine, [], "pairs_s") is None
    (grid,) = report.grids({"w1": {"floor": its, "redlease": mine}})
    assert grid.rows == [["floor", "20"], ["redlease", "10 (0.50)"]]


@pytest.mark.slow
def test_every_picture_is_drawn(tmp_path: Path) -> None:
    """What was measured is drawn as SVG, the same each time; without matplotlib the program says what to install."""
    if importlib.util.find_spec("matplotlib") is None:
        program = ended("w3", "--plots", str(tmp_path))
        assert program.returncode == 2
        assert "pip install --group bench" in program.stderr
        return
    plots = importlib.import_module("plots")
    results = {key: result(pairs_s=100.0, p50_us=50.0, server_us_grant=10.0) for key in EVERY_WORKLOAD}
    drawn = [path.read_text() for path in plots.draw_all(results, tmp_path)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["growth.svg", "handoffs.svg", "throughput.svg"]
    assert all("</svg>" in text for text in drawn)
    assert [path.read_text() for path in plots.draw_all(results, tmp_path)] == drawn
    assert not list(plots.draw_all({"w1": result(pairs_s=1.0)}, tmp_path))


@pytest.mark.slow
async def test_the_picture_of_fairness(url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A crowd delays others without keys and not with them, shares are kept, and both are drawn."""
    fairness = importlib.import_module("fairness")
    for name, value in {"CROWD": 400, "EACH": 100, "SHOWN": 6}.items():
        monkeypatch.setattr(fairness, name, value)
    async with Redlease.from_url(url, prefix=prefix) as client:
        late = await fairness.others_begun(client, keys=False)
        soon = await fairness.others_begun(client, keys=True)
        shares = await fairness.units_held(client)
    assert late.index(99) == (400 + 99 - 1) // 20
    assert soon.index(99) < 6
    four, two, one = (counts[-1] for counts in shares.values())
    assert four + two + one == 6 * 20
    assert four == pytest.approx(2 * two, abs=3)
    assert two == pytest.approx(2 * one, abs=3)
    fairness.draw({"late": late, "soon": soon}, shares, tmp_path / "fairness.svg")
    assert "</svg>" in (tmp_path / "fairness.svg").read_text()
