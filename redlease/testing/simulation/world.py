"""One simulation: processes, the network, the server, the faults that befall them, and the judge."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redlease._core.client import Redlease
from redlease.events import Event, Granted, Lost

from .engines import NAMES, Engine, Executed, ModelEngine, ScriptEngine
from .environment import EPOCH_S, replaced
from .faults import BREAKS, DOWN_S, Fault
from .judge import Judge
from .loop import ARRIVED, SimulatedLoop
from .network import Network
from .process import Process
from .server import Server

URL = "redis://simulated"
SHOWN = 25  # how much of what happened a failure shows
ENDING_S = 100.0  # how long what was cancelled at the end may take
Main = Callable[[Redlease], Awaitable[object]]


class SimulationFailed(AssertionError):
    """A promise was broken, a process has raised, or it has not ended.

    Attributes:
        violations: What was broken, each with when and what.
        trace: The last of what happened.
    """

    def __init__(self, violations: Sequence[str], trace: Sequence[str] = ()) -> None:
        self.violations, self.trace = list(violations), list(trace)
        shown = ["The last of what happened:", *(f"  {line}" for line in trace)] if trace else []
        super().__init__("\n".join([*self.violations[:6], *shown]))


@dataclass
class Report:
    """What a simulation did.

    Attributes:
        seconds: How long it lasted, in virtual seconds.
        calls: How many scripts the server has executed.
        grants: How many permits were granted.
        losses: How many holds were lost.
        left: The tickets that held or waited on the server when all processes had ended, by resource.
        digest: A hash of the trace: the same whenever the same code is simulated with the same seed and faults.
        trace: All calls, events and faults, a line each.
    """

    seconds: float
    calls: int
    grants: int
    losses: int
    left: dict[str, list[str]]
    digest: str
    trace: list[str] = field(repr=False)


@dataclass
class Started:
    """A process of a simulation."""

    process: Process
    main: Main
    start: float
    settings: dict[str, Any]
    client: Redlease | None = None
    has_ended: bool = False
    error: BaseException | None = None

    @property
    def lives(self) -> bool:
        """Whether it has something left to do."""
        return self.process.is_alive and not self.has_ended


class Simulation:
    """Processes with a redlease client each, and one server, in virtual time: the same whenever it has the same seed.

    Their code runs as it is. Only time, the network, what is random and the server's memory are simulated: a fault
    stops a process in the midst of it, loses a reply, or takes the server's data. Meanwhile the simulation checks the
    promises of `docs/guarantees.md`; whether anything is left at the end (P6) is for the caller to judge by the report,
    as a process that was killed leaves what it had until that expires.

    Args:
        seed: Of everything that is random.
        faults: What befalls the processes and the server.
        engine: "scripts": the server's scripts on fakeredis, with all that redlease has. "model": a model of them,
            which is several times faster, and knows only what locks, semaphores, holds and permits call.
        latency: How long bytes travel at most, in seconds.
        limit: The virtual seconds within which all processes must have ended.

    Raises:
        ModuleNotFoundError: fakeredis is not installed: `pip install 'redlease[testing]'`.

    Example:
        >>> from redlease.testing import Fault, Simulation
        >>> entered = []
        >>> async def worker(client):
        ...     async with client.lock("invoice:42", lease=5).hold() as hold:
        ...         entered.append(hold.fence)
        ...         await asyncio.sleep(1)
        >>> simulation = Simulation(seed=7, faults=[Fault(0.5, "kill", "a")])
        >>> for name in ("a", "b"):
        ...     simulation.process(name, worker)
        >>> report = simulation.run()
        >>> entered == sorted(entered)
        True
    """

    def __init__(
        self,
        seed: int | str = 0,
        *,
        faults: Sequence[Fault] = (),
        engine: Literal["scripts", "model"] = "scripts",
        latency: float = 0.002,
        limit: float = 600.0,
    ) -> None:
        self.seed, self.faults, self.limit = seed, list(faults), limit
        nobody = Process("nobody", f"{seed}")
        self.loop = SimulatedLoop(nobody)  # type: ignore[abstract]  # it refuses what it does not simulate
        self._server_process = Process("server", f"{seed}")
        data: Engine = (ModelEngine if engine == "model" else ScriptEngine)(self._server_us)
        self._server = Server(data, self._later, self._on_call)
        self._network = Network(self.loop, self._server_process, self._server.accept, latency)
        self._judge = Judge(lambda: self.loop.now * 1000, self._server_us)
        self.loop.on_idle = self._judge.look
        self._started: dict[str, Started] = {}
        self._trace: list[tuple[float, str, tuple[Any, ...]]] = []
        self._grants: set[tuple[str, int]] = set()
        self._losses = 0
        self._has_ended = False
        self._saved: dict[int, Any] = {}
        self._failures: list[BaseException] = []

    # What users call

    def process(self, name: str, main: Main, *, start: float = 0.0, **settings: Any) -> None:
        """Add a process: from `start` on, in virtual seconds, it runs `main` with a client, and closes that at the end.

        Args:
            name: What faults and the report call it, and the owner of its permits.
            main: Called with the entered client. The process ends when it returns; what it raises fails the simulation.
            start: When.
            **settings: Of the client, as for `Redlease`: `lease`, `waiter_lease`, `call_timeout` and the like.

        Raises:
            ValueError: There is a process of that name already.
        """
        if name in self._started or name in {"server", "nobody"}:
            raise ValueError(f"there is a process {name!r} already")
        self._started[name] = Started(Process(name, f"{self.seed}"), main, start, settings)

    @property
    def processes(self) -> list[str]:
        """The names of the processes, in the order in which they were added."""
        return list(self._started)

    @property
    def now(self) -> float:
        """The virtual time, in seconds since the beginning."""
        return self.loop.now

    def run(self) -> Report:
        """Run it once, until all processes have ended.

        Raises:
            SimulationFailed: A promise was broken, a process raised, or has not ended within `limit`.
            ValueError: A fault names a process that there is not.
        """
        unknown = {fault.process for fault in self.faults if fault.process} - set(self._started)
        if unknown:
            raise ValueError(f"there are no processes {sorted(unknown)} for the faults that name them")
        with replaced(self.loop):
            self._schedule()
            self.loop.run(self.limit, self._is_over)
            self._judge_end()
            report = self.report()
            self._end()
        if self._judge.violations:
            raise SimulationFailed(self._judge.violations, report.trace[-SHOWN:]) from next(iter(self._failures), None)
        return report

    def report(self) -> Report:
        """Return what has happened until now."""
        lines = list(self.lines())
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        calls = sum(what not in {"event", "fault"} for _, what, _ in self._trace)
        left = self._judge.left_behind()
        return Report(self.now, calls, len(self._grants), self._losses, left, digest, lines)

    def lines(self) -> Iterator[str]:
        """Yield what has happened, a line each."""
        for at, what, values in self._trace:
            yield f"{at:.6f} {what} {' '.join(map(str, values))}"

    # How it runs

    def _server_us(self) -> int:
        return int((EPOCH_S + self.loop.now + self._server_process.clock_offset_s) * 1e6)

    def _later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        self.loop.put(self.loop.now + seconds, ARRIVED, self._server_process, callback, *args)

    def _on_call(self, sha: str, words: list[bytes], executed: Executed) -> None:
        name = NAMES.get(sha, "script")
        arguments = b" ".join(words[5:]).decode("latin-1")
        self._trace.append((self.loop.now, name, (arguments, "->", executed.reply[1:], *executed.messages)))
        self._judge.on_call(sha, words, executed)

    def _schedule(self) -> None:
        for each in self._started.values():
            self.loop.put(each.start, ARRIVED, each.process, self._begin, each)
        for number, fault in enumerate(self.faults):
            if fault.kind == "failover":
                self.loop.put(max(0.0, fault.at - fault.seconds), ARRIVED, self._server_process, self._save, number)
            self.loop.put(fault.at, ARRIVED, self._server_process, self._inject, number, fault)

    def _begin(self, each: Started) -> None:
        settings: dict[str, Any] = {"owner": each.process.name, "on_event": self._on_event} | each.settings
        each.client = Redlease.from_url(URL, **settings)
        self._judge.clients[each.client] = each.process
        self.loop.create_task(self._live(each, each.client), name=each.process.name)

    async def _live(self, each: Started, client: Redlease) -> None:
        try:
            async with client:
                await each.main(client)
        except BaseException as error:  # noqa: BLE001 - it is raised by `run`
            each.error = error
        self._judge.clients.pop(client, None)
        each.has_ended = True
        self._check_finished()
        self._trace.append((self.loop.now, "event", (each.process.name, "ended", repr(each.error))))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Granted):
            self._grants.add((event.resource, event.fence))
        self._losses += isinstance(event, Lost)
        self._trace.append((self.loop.now, "event", (self.loop.current.name, event)))

    def _is_over(self) -> bool:
        return self._has_ended or bool(self._judge.violations or self.loop.failures)

    def _check_finished(self) -> None:
        """See whether everybody has ended, or somebody has failed."""
        every = self._started.values()
        self._has_ended = any(each.error for each in every) or not any(each.lives for each in every)

    # What befalls it

    def _save(self, number: int) -> None:
        self._saved[number] = (self._server.engine.save(), self._judge.save())

    def _inject(self, number: int, fault: Fault) -> None:
        self._trace.append((self.loop.now, "fault", (fault.kind, fault.process, fault.seconds)))
        if fault.kind in BREAKS:
            self._judge.allow_violation()
        if fault.process:
            self._inject_into_process(self._started[fault.process], fault)
        elif fault.kind == "step_clock":
            self._server_process.clock_offset_s += fault.seconds
        else:
            self._server.crash()
            if fault.kind != "restart":
                engine, known = self._saved.pop(number, (None, None))
                self._server.engine.restore(engine)
                self._judge.restore(known)
            self._later(DOWN_S if fault.kind == "failover" else fault.seconds, self._listen)

    def _listen(self) -> None:
        self._server.is_up = True

    def _inject_into_process(self, each: Started, fault: Fault) -> None:
        process, kind, seconds = each.process, fault.kind, fault.seconds
        if kind == "pause":
            process.stop(self.loop.now, seconds)
        elif kind == "stop_after_clock":
            process.stop_after_clock_s = seconds
        elif kind == "silence":
            self._network.hold(process, seconds)
        elif kind == "kill":
            process.is_alive = False
            if each.client is not None:
                self._judge.clients.pop(each.client, None)
            self._check_finished()
        for link in self._network.of(process):
            if kind in {"kill", "cut", "cut_late"}:
                link.cut(seconds if kind == "cut_late" else None)
            else:
                link.peer.inject(kind, seconds)

    # How it ends

    def _judge_end(self) -> None:
        judge = self._judge
        judge.look()
        for each in self._started.values():
            if each.error is not None:
                self._failures.append(each.error)
                judge.violations.append(f"the process {each.process.name!r} has raised {each.error!r}")
        if not self._is_over():
            waiting = ", ".join(name for name, each in self._started.items() if each.lives)
            judge.violations.append(f"liveness (P4): {waiting} has not ended within {self.limit:g} s")
        for context in self.loop.failures:
            error = context.get("exception")
            self._failures += [error] if error is not None else []
            judge.violations.append(f"a callback has failed: {context.get('message')}: {error!r}")
        judge.is_off = True

    def _end(self) -> None:
        """Cancel what is left, that of killed processes too, so that no object outlives the simulation unfinished."""
        self._network.is_over = True
        self._server.crash()
        for each in self._started.values():
            each.process.is_alive, each.process.busy_until = True, 0.0
            if each.client is not None and not each.has_ended:
                self.loop.put(self.loop.now, ARRIVED, each.process, self._abandon, each.client)
        for task in list(self.loop.tasks):
            task.cancel()
        self.loop.run(self.loop.now + ENDING_S, lambda: not self.loop.tasks)
        self.loop.close()

    def _abandon(self, client: Redlease) -> None:
        self.loop.create_task(client.abandon())
