"""Records histories on a real server, and has Porcupine and our own checks judge them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import linearizable
from episodes import Fault, Scene
from judges import Findings, judge, since_loss
from proxy import Proxy
from records import History
from rounds import Workload, running
from servers import Server

REDLEASE = Workload("redlease", histories=40)
# Neither has semaphores; python-redis-lock knows whole seconds only.
OTHERS = {name: Workload(name, histories=20, capacities=(1,)) for name in ("redis-py", "python-redis-lock")}
# Each of its processes is a JVM, so CI does without it.
REDISSON = Workload("redisson", histories=20, capacities=(1,))


async def record_and_judge(  # noqa: PLR0917  in the order in which one thinks of them
    workload: Workload,
    count: int,
    seed: int,
    engine: str = "valkey9",
    keep: Path | None = None,
    fault: Fault | None = None,
) -> Findings:
    """Run rounds until there are so many histories, each round judged while the next one runs.

    Args:
        workload: What is run.
        count: How many histories at least.
        seed: What processes do, and when they are stopped and killed, is drawn from it. How calls interleave is not.
        engine: The server: "valkey9", "redis7" or "redis62".
        keep: Where the operations of histories with violations are written to.
        fault: What strikes in each round, in place of a stop and a kill of processes.
    """
    findings, recorded = Findings(), 0
    judging: asyncio.Task[Findings] | None = None
    kept = fault is None or fault.keeps
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(Server(engine, *(fault.arguments if fault else ())))
        proxy = await stack.enter_async_context(Proxy(server.port)) if fault and fault.by_proxy else None
        async with running(workload, proxy.url if proxy else server.url, seed) as rounds:
            if fault is not None:
                strike = fault.strike
                rounds.strike = lambda draw: strike(Scene(server, proxy, draw))
            while recorded < count:
                histories = await rounds.run()
                recorded += len(histories)
                if judging is not None:
                    findings.add(await judging)
                judging = asyncio.create_task(asyncio.to_thread(judge_all, histories, keep, kept))
            if judging is not None:
                findings.add(await judging)
            findings.judged.update(
                histories=recorded, faults=rounds.struck, stopped=rounds.stopped, killed=rounds.killed
            )
    return findings


def judge_all(histories: list[History], keep: Path | None = None, kept: bool | None = True) -> Findings:
    """Judge histories by Porcupine and by our own checks, and keep those that are wrong.

    `kept`: whether the server kept its data when the fault struck, None if that is not known. If it may have lost them,
    it is counted in how many histories that shows.
    """
    findings, verdicts = Findings(), linearizable.judge(histories)
    if not kept:
        findings.judged["data missed"] = sum(verdict["verdict"] != "Ok" for verdict in verdicts.values())
        verdicts = linearizable.judge([since_loss(history) for history in histories])
    for history in histories:
        found = judge(history, kept=kept)
        verdict = verdicts.get(history.name, {"verdict": "Ok"})["verdict"]
        if verdict != "Ok":
            found.violations.append(f"{history.name}: exclusion: Porcupine says {verdict}")
        if found.violations and keep is not None:
            lines = [operation.line(history) for operation in history.operations]
            (keep / f"{history.name}.jsonl").write_text("\n".join(lines))
        findings.add(found)
    return findings
