"""A program whose finalizers and signal handlers call `redlease.sync` while its threads do.

It is called with a kind of `KINDS`, a URL, a prefix, and a number of rounds.
It prints "free" if nothing hangs and nothing is left. If it hangs, it prints where each thread is, and ends.
"""

from __future__ import annotations

import dis
import faulthandler
import gc
import random
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from redlease.sync import Hold, Redlease, RedleaseError
from redlease.sync.thread.background import process

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

WITHOUT_PROGRESS_S = 20.0
OWN = "redlease/sync/"


def progress() -> None:
    """Put off the end of a program that hangs."""
    faulthandler.dump_traceback_later(WITHOUT_PROGRESS_S, exit=True)


def use(client: Redlease, name: str) -> None:
    """Make each kind of call once."""
    lock = client.lock(name)
    with lock.hold() as hold:
        hold.check()
    with lock:
        pass
    permit = lock.acquire()
    lock.release(permit)


def at_each_step(url: str, prefix: str, rounds: int) -> None:
    """At each bytecode of redlease in turn, from the first use of a client until it is closed, call redlease.

    Args:
        url: Of the server.
        prefix: Of the names.
        rounds: How many bytecodes are left out after each one that is not.
    """
    with Redlease.from_url(url, prefix=prefix) as other:
        step = 0
        while _interrupted_at(step, url, prefix, other):
            progress()
            step += rounds
        sys.stderr.write(f"{step} bytecodes\n")
        assert step > 1000


def _interrupted_at(step: int, url: str, prefix: str, other: Redlease) -> bool:
    """Call redlease at that bytecode; return False if there are not so many."""
    left = step
    is_done = False

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal left, is_done
        if OWN not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if process().lock.locked():
                check_undisturbed(frame)
                return trace
            left -= 1
            if left < 0 and not is_done:
                is_done = True
                use(client, "by a finalizer")
                use(other, "by a finalizer")
        return trace

    client = Redlease.from_url(url, prefix=prefix)
    try:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for them only once a frame has said so
        sys.settrace(trace)
        use(client, "by the program")
        sys.settrace(None)
    finally:
        client.close()
    return is_done


# What may stand between the steps that take and leave the lock of the process, by the beginnings of names: nothing that
# allocates an object, or looks for signals. So the interpreter runs no finalizer or handler there.
UNDISTURBED = (
    *(
        "CACHE",
        "CONTAINS_OP",
        "COPY",
        "DELETE_SUBSCR",
        "EXTENDED_ARG",
        "IS_OP",
        "JUMP_FORWARD",
        "JUMP_IF_",
        "LOAD_ATTR",
    ),
    *("LOAD_CONST", "LOAD_FAST", "NOP", "POP_JUMP_FORWARD", "POP_JUMP_IF", "POP_TOP", "PRECALL", "STORE_ATTR"),
    *("STORE_FAST", "STORE_SUBSCR", "SWAP", "TO_BOOL", "UNARY_NOT"),
)
LEAVES = "LOAD_CONST LOAD_CONST LOAD_CONST CALL"
last_names: list[str] = []


def check_undisturbed(frame: FrameType) -> None:
    """Fail if the interpreter may run a finalizer or a handler at this bytecode, which is executed under the lock."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    last_names.append(name)
    leaves = " ".join([each for each in last_names[-5:] if each != "PRECALL"]).endswith(LEAVES)
    if not name.startswith(UNDISTURBED) and not leaves:
        sys.exit(f"{name} in {frame.f_code.co_name}, under the lock of the process")


class Cached:
    """What a program keeps in a cycle, so that the collector ends it, in whichever thread and at whichever step."""

    refused = ended = 0

    def __init__(self, hold: Hold, pool: Any) -> None:
        self.hold, self.pool, self.itself = hold, pool, self

    def __del__(self) -> None:
        Cached.ended += 1
        self.hold.release()
        try:
            with self.pool.hold():
                pass
        except RedleaseError:  # in redlease's own thread
            Cached.refused += 1


def collected(url: str, prefix: str, rounds: int) -> None:
    """Collect at every allocation what releases a permit, and takes another one, when it is collected."""
    with Redlease.from_url(url, prefix=prefix) as client:
        cached, used = client.semaphore("cached", 1000), client.semaphore("used", 1000)

        def work() -> None:
            while Cached.ended < rounds:
                Cached(cached.hold().acquire(), used)
                with used.hold():
                    progress()

        gc.set_threshold(1)
        in_threads(work, 4)
        gc.set_threshold(700)
        gc.collect()
        assert cached.acquire(weight=1000, timeout=10)
        assert used.acquire(weight=1000, timeout=10)
        sys.stderr.write(f"{Cached.ended} finalizers, {Cached.refused} of them in redlease's own thread\n")


def signalled(url: str, prefix: str, rounds: int) -> None:
    """Handle signals at any step, whose handler takes and releases permits."""
    with Redlease.from_url(url, prefix=prefix) as client:
        pool = client.semaphore("p", 1000)
        handled = 0

        def handle(*_: object) -> None:
            nonlocal handled
            handled += 1
            progress()
            with pool.hold():
                pass
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))

        def work() -> None:
            while handled < rounds:
                with pool.hold():
                    pass

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert pool.acquire(weight=1000, timeout=10)


def in_threads(work: Callable[[], None], count: int) -> None:
    """Do it in so many threads."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


KINDS = {"at-each-step": at_each_step, "collected": collected, "signalled": signalled}

if __name__ == "__main__":
    progress()
    KINDS[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
    assert process().background is None
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    sys.stdout.write("free\n")
