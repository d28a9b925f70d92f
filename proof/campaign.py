"""Records histories on a real server, and has Porcupine and our own checks judge them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import linearizable
from judges import Findings, judge
from records import History
from rounds import Workload, running
from servers import Server

REDLEASE = Workload("redlease", histories=40)
# Neither has semaphores; python-redis-lock knows whole seconds only.
OTHERS = {name: Workload(name, histories=20, capacities=(1,)) for name in ("redis-py", "python-redis-lock")}


async def record_and_judge(
    workload: Workload, count: int, seed: int, engine: str = "valkey9", keep: Path | None = None
) -> Findings:
    """Run rounds until there are so many histories, each round judged while the next one runs.

    Args:
        workload: What is run.
        count: How many histories at least.
        seed: What processes do, and when they are stopped and killed, is drawn from it. How calls interleave is not.
        engine: The server: "valkey9", "redis7" or "redis62".
        keep: Where the operations of histories with violations are written to.
    """
    findings, recorded = Findings(), 0
    judging: asyncio.Task[Findings] | None = None
    with Server(engine) as server:
        async with running(workload, server.url, seed) as rounds:
            while recorded < count:
                histories = await rounds.run()
                recorded += len(histories)
                if judging is not None:
                    findings.add(await judging)
                judging = asyncio.create_task(asyncio.to_thread(judge_all, histories, keep))
            if judging is not None:
                findings.add(await judging)
            findings.judged.update(histories=recorded, stopped=rounds.stopped, killed=rounds.killed)
    return findings


def judge_all(histories: list[History], keep: Path | None = None) -> Findings:
    """Judge histories by Porcupine and by our own checks, and keep those that are wrong."""
    findings, verdicts = Findings(), linearizable.judge(histories)
    for history in histories:
        found = judge(history)
        verdict = verdicts[history.name]["verdict"] if history.operations else "Ok"
        if verdict != "Ok":
            found.violations.append(f"{history.name}: exclusion: Porcupine says {verdict}")
        if found.violations and keep is not None:
            lines = [operation.line(history) for operation in history.operations]
            (keep / f"{history.name}.jsonl").write_text("\n".join(lines))
        findings.add(found)
    return findings
