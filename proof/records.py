"""What processes record: one JSON line when a call begins and one when it ends, so that a killed process loses nothing.

All times are ns of the host's wall clock, which is the clock of the server too; the worker checks that (`same_clock`).
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MS = 1_000_000  # ns


def now() -> int:
    """Return the host's wall clock: what the server's TIME is read from as well."""
    return time.time_ns()


@dataclass
class Operation:
    """One call, in the shape that `porcupine/main.go` reads; `returned` is None if the process died in it."""

    op: str
    client: int
    ticket: str
    call: int
    returned: int | None = None
    fence: int = 0
    weight: int = 1
    until: int = 0

    def line(self, history: History) -> str:
        """Return it as a line for Porcupine."""
        shown = {"history": history.name, "capacity": history.capacity, **vars(self)}
        shown["return"] = shown.pop("returned")
        return json.dumps(shown)


@dataclass
class Seen:
    """A look at the queue, between two moments: who waited, in which order, by ticket."""

    since: int
    at: int
    waiters: list[str]


@dataclass
class Loss:
    """When a hold was told that its permit is lost, and the end of its lease as its client knew it."""

    client: int
    ticket: str
    at: int
    until: int


@dataclass
class History:
    """All that happened on one resource; `struck`: from when until when a fault struck; `lease_ns`: of all leases."""

    name: str
    capacity: int
    operations: list[Operation] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    stalls: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    struck: tuple[int, int] = (0, 0)
    lease_ns: int = 0


class Recorder:
    """Writes the records of one process, each line with one system call."""

    def __init__(self, path: Path, client: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._client = client
        self._calls = 0

    def write(self, kind: str, history: str, **values: Any) -> None:
        """Write one record."""
        line = json.dumps({"kind": kind, "history": history, "client": self._client, **values})
        os.write(self._file, f"{line}\n".encode())

    def call(self, history: str, op: str, ticket: str, **values: Any) -> int:
        """Write that a call begins; the number goes to `returned`."""
        self._calls += 1
        self.write("call", history, id=self._calls, op=op, ticket=ticket, at=now(), **values)
        return self._calls

    def returned(self, history: str, call: int, *, ok: bool, **values: Any) -> None:
        """Write that it has ended; ok False: without a permit or, of a release, it is not known how."""
        self.write("return", history, id=call, ok=ok, at=now(), **values)


def read(paths: list[Path], capacities: dict[str, int]) -> list[History]:
    """Return the histories that these files tell."""
    histories = {name: History(name, capacity) for name, capacity in capacities.items()}
    for path in paths:
        calls: dict[int, Operation] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            kind, client, name = record.pop("kind"), record.pop("client"), record.pop("history")
            if kind == "stall":
                for history in histories.values():
                    history.stalls[client].append((record["since"], record["at"]))
            elif name in histories:
                _add(histories[name], kind, client, record, calls)
        _forget_unanswered(histories, calls)
    for history in histories.values():
        _give_up_lost(history)
    return list(histories.values())


def _add(history: History, kind: str, client: int, record: dict[str, Any], calls: dict[int, Operation]) -> None:
    if kind == "seen":
        history.seen.append(Seen(**record))
    elif kind == "loss":
        history.losses.append(Loss(client, **record))
    elif kind == "check":
        since, at = record.pop("since"), record.pop("at")
        history.operations.append(Operation("check", client, call=since, returned=at, **record))
    elif kind == "call":
        number, at = record.pop("id"), record.pop("at")
        operation = calls[number] = Operation(client=client, call=at, **record)
        history.operations.append(operation)
    else:
        operation = calls.pop(record["id"])
        if record["ok"]:
            operation.returned = record["at"]
            for name in record.keys() & {"fence", "until"}:
                setattr(operation, name, record[name])
        elif operation.op == "acquire":
            history.operations.remove(operation)


def _give_up_lost(history: History) -> None:
    """Add the release that the client of each lost hold sends, maybe a moment before the server's deadline."""
    for loss in history.losses:
        known = [each for each in history.operations if each.ticket == loss.ticket and each.op != "release"]
        last = max(known, key=lambda each: each.call)
        history.operations.append(Operation("release", loss.client, loss.ticket, last.call, fence=last.fence))


def _forget_unanswered(histories: dict[str, History], calls: dict[int, Operation]) -> None:
    """Leave out acquires that a dead process never had the answer to: a grant that nobody knows of forbids nothing."""
    unanswered = {id(operation) for operation in calls.values() if operation.op == "acquire"}
    for history in histories.values():
        history.operations = [each for each in history.operations if id(each) not in unanswered]
