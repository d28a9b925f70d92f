"""A program whose threads get exceptions from another thread, as Temporal, dramatiq and RQ cancel them.

It is called with a kind of `KINDS`, a URL, a prefix, and a number of exceptions. It prints "free" if each ended what
its thread did within two seconds, and nothing is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import faulthandler
import gc
import random
import sys
import threading
import time
from queue import SimpleQueue
from threading import get_ident
from typing import TYPE_CHECKING, Any

from redlease.sync import Redlease
from redlease.sync.thread import background
from redlease.sync.thread.background import process

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

WITHOUT_PROGRESS_S, MAX_S = 30.0, 2.0


class Stop(BaseException):
    """What is thrown."""


class Throwing:
    """Workers that each begin anew when they are stopped, and what stops them, at random moments.

    Args:
        work: What a worker does again and again.
        count: How many workers there are.
        pause_s: How long one works at most until it is stopped.
    """

    def __init__(self, work: Callable[[], None], count: int, pause_s: float) -> None:
        self._work = work
        self._pause_s = pause_s
        self._ready: SimpleQueue[int] = SimpleQueue()
        self._thrown_at: dict[int, float] = {}
        self.swallowed = self.stopped = 0
        self.longest_s = self.paused_s = 0.0
        self._is_over = False
        self._threads = [threading.Thread(target=self._endure) for _ in range(count)]
        sys.unraisablehook = self._on_unraisable

    def _on_unraisable(self, unraisable: Any) -> None:
        if unraisable.exc_type is Stop:  # in a finalizer: it is to be thrown again
            self.swallowed += 1
            self._ready.put(get_ident())
        else:
            sys.__unraisablehook__(unraisable)

    def _endure(self) -> None:
        while not self._is_over:
            try:
                self._ready.put(get_ident())
                while True:
                    self._work()
            except Stop:
                self.longest_s = max(self.longest_s, time.monotonic() - self._thrown_at[get_ident()])

    def _feel_the_pulse(self) -> None:
        """Note for how long the whole process stood still: a busy machine is no fault of what is tested."""
        before = time.monotonic()
        while not self._is_over:
            time.sleep(0.05)
            now = time.monotonic()
            self.paused_s = max(self.paused_s, now - before)
            before = now

    def run(self, rounds: int) -> None:
        """Stop workers so often."""
        threading.Thread(target=self._feel_the_pulse).start()
        for thread in self._threads:
            thread.start()
        due: list[tuple[float, int]] = []
        for _ in range(rounds):
            faulthandler.dump_traceback_later(WITHOUT_PROGRESS_S, exit=True)
            while not due or not self._ready.empty():
                due.append((time.monotonic() + random.uniform(0, self._pause_s), self._ready.get()))
            due.sort(reverse=True)
            at, number = due.pop()
            time.sleep(max(0, at - time.monotonic()))
            self._throw(number)
            self.stopped += 1
        self._is_over = True
        left = {number for _, number in due}
        while any(thread.is_alive() for thread in self._threads):
            for number in left:
                self._throw(number)
            left = set()
            while not self._ready.empty():
                left.add(self._ready.get())
            time.sleep(0.01)

    def _throw(self, thread: int) -> None:
        self._thrown_at[thread] = time.monotonic()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stop))


def checked(throwing: Throwing, client: Redlease, capacities: dict[str, int]) -> None:
    """Fail if the work went on, or left something."""
    sys.stderr.write(
        f"{throwing.stopped} thrown, {throwing.swallowed} in finalizers, longest {throwing.longest_s:.2f} s, "
        f"while the machine paused for {throwing.paused_s:.2f} s at most\n"
    )
    for name, capacity in capacities.items():
        pool = client.semaphore(name, capacity)
        found = pool.inspect()
        assert pool.acquire(weight=capacity, timeout=2), found
    assert not process().background.calls  # type: ignore[union-attr]
    assert throwing.longest_s < MAX_S + throwing.paused_s


def waiting(client: Redlease, rounds: int) -> None:
    """Stop threads that wait for a lock."""
    lock = client.lock("r")

    def work() -> None:
        with lock.hold():
            pass

    with lock.hold():
        throwing = Throwing(work, 200, 0.2)
        throwing.run(rounds)
    checked(throwing, client, {"r": 1})


def bodies(client: Redlease, name: str) -> dict[str, Callable[[], object]]:
    """Return what a program does with the lock and the pool of that name."""
    lock, pool = client.lock(name), client.semaphore(f"{name} pool", 2)

    def held() -> None:
        with pool.hold() as hold:
            hold.check()

    def told() -> None:
        with lock.hold(on_lost="raise"):
            pass

    def plain() -> None:
        with lock:
            pass

    def both() -> None:
        with client.all(lock, pool):
            pass

    @lock.holding()
    def guarded() -> None:
        pass

    def failing() -> None:
        with contextlib.suppress(ValueError), pool.hold(), lock:
            raise ValueError

    return {each.__name__: each for each in (held, told, plain, both, guarded, failing)} | {"acquired": lock.acquire}


def working(client: Redlease, rounds: int) -> None:
    """Stop threads at random steps of what they do with permits."""
    works = list(bodies(client, "r").values())[:-1]

    def any_of_them() -> None:
        random.choice(works)()

    throwing = Throwing(any_of_them, 4, 0.01)
    throwing.run(rounds)
    checked(throwing, client, {"r": 1, "r pool": 2})


def at_each_step(client: Redlease, rounds: int) -> None:
    """Raise at each step at which the interpreter may, in turn, while the traceback and the variables stay.

    These are the beginning of each function of Python, and the end of each call of C.
    """
    steps = 0
    for kind in bodies(client, "r"):
        step = 0
        while _stopped_at(client, f"{kind} {step}", kind, step):
            step += rounds
        steps += step
    sys.stderr.write(f"{steps} steps\n")
    assert steps > 500


def _stopped_at(client: Redlease, name: str, kind: str, step: int) -> bool:
    """Return whether there are so many steps."""
    faulthandler.dump_traceback_later(WITHOUT_PROGRESS_S, exit=True)
    work, left = bodies(client, name)[kind], step

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal left
        if event in {"call", "c_return"}:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise Stop

    swallowed: list[Any] = []
    sys.unraisablehook = swallowed.append
    try:
        sys.setprofile(count)
        work()
        sys.setprofile(None)
    except Stop as stop:
        sys.setprofile(None)
        check_free(client, name, stop)
        return True
    assert not swallowed, "it came in a finalizer, and the work went on to its end"
    return False


def at_the_jump(client: Redlease, _: int) -> None:
    """Raise where a thread begins the next slice of a wait, at which the interpreter may do so as well."""
    lock, jumps = client.lock("r"), 0
    background.SLICE_S = 0.01

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal jumps
        if frame.f_code.co_filename != background.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and "JUMP_BACKWARD" in dis.opname[frame.f_code.co_code[frame.f_lasti]]:
            jumps += 1
            sys.settrace(None)
            raise Stop
        return trace

    with lock.hold():
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for them only once a frame has said so
        with contextlib.suppress(Stop):
            sys.settrace(trace)
            lock.acquire(timeout=5)
        sys.settrace(None)
        assert jumps == 1
        assert not lock.inspect().waiters


def check_free(client: Redlease, name: str, after: object) -> None:
    """Fail if anything is held, though what was raised, and all that it refers to, is still there."""
    for resource, capacity in ((name, 1), (f"{name} pool", 2)):
        pool = client.semaphore(resource, capacity)
        assert pool.acquire(weight=capacity, timeout=2), (resource, after)


KINDS = {"waiting": waiting, "working": working, "at-each-step": at_each_step, "at-the-jump": at_the_jump}

if __name__ == "__main__":
    sys.setswitchinterval(1e-6)  # so that exceptions come between any two steps
    gc.disable()  # what is left is released at once, and not when it is collected
    with Redlease.from_url(sys.argv[2], prefix=sys.argv[3], lease=120) as client:
        KINDS[sys.argv[1]](client, int(sys.argv[4]))
    sys.stdout.write("free\n")
