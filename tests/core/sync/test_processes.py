"""What needs a process of its own: Ctrl-C, forks, and the end of the interpreter."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis

from redlease.sync import Redlease, RedleaseError

if TYPE_CHECKING:
    from collections.abc import Iterator


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(program: str, *arguments: str, timeout: float = 30) -> str:
    """Run a program that says nothing of an error; return what it prints."""
    with started(program, *arguments) as process:
        out, errors = process.communicate(timeout=timeout)
    assert (process.returncode, errors) == (0, "")
    return out.strip()


WAITS = """
import sys
from redlease.sync import Redlease

with Redlease.from_url(sys.argv[1], prefix=sys.argv[2]) as client:
    try:
        with client.lock("r").hold():
            print("entered")
    except KeyboardInterrupt:
        print("left", len(client.lock("r").inspect().waiters))
        raise
"""


def test_ctrl_c_ends_a_wait(client: Redlease, url: str, prefix: str) -> None:
    """A script that waits ends with KeyboardInterrupt at once, and its request is out of the queue by then."""
    lock = client.lock("r")
    with lock, started(WAITS, url, prefix) as process:
        with lock.watch() as snapshots:
            next(snapshot for snapshot in snapshots if snapshot.waiters)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, errors = process.communicate(timeout=10)
        assert time.monotonic() - began < 5
    assert out.strip() == "left 0"
    assert errors.strip().endswith("KeyboardInterrupt")


STORM = """
import gc, random, signal, sys, warnings
from redlease.sync import Redlease
from redlease.sync.thread.background import process


class Stop(BaseException):
    pass


def stop(_, frame):
    global alarms_left
    alarms_left -= 1
    if alarms_left <= 0:  # on a busy machine, a timer that fires on would leave no time for the work
        signal.setitimer(signal.ITIMER_REAL, 0)
    while frame is not None:  # the work alone is interrupted, and not what counts and disarms
        if frame.f_code is five_times.__code__:
            raise Stop
        frame = frame.f_back


def five_times(work):
    for _ in range(5):
        work()


signal.signal(signal.SIGALRM, stop)
sys.unraisablehook = id  # an interrupted finalizer reports that; a function of C is not interrupted itself
warnings.simplefilter("ignore")  # a request that is interrupted before it is entered is never entered
again = float(sys.argv[3])
with Redlease.from_url(sys.argv[1], prefix=sys.argv[2], lease=60) as client:
    lock, pool = client.lock("r"), client.semaphore("p", 2)
    stopped = 0

    def held():
        with lock.hold():
            pass

    def both():
        with client.all(lock, pool):
            pass

    while stopped < 2000:
        work = random.choice([held, both, lock.inspect])
        alarms_left = 100
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3), again * random.uniform(1e-5, 1e-3))
        try:
            five_times(work)
        except Stop:
            stopped += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    gc.collect()
    lock.inspect()  # behind what was given back
    assert lock.acquire(timeout=5) and pool.acquire(weight=2, timeout=5)
    assert not process().background.calls
print("free")
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 1])
def test_interruptions_leave_nothing(url: str, prefix: str, again: int) -> None:
    """Two thousand interruptions at any moment, also during the clean-up, leave no permit, place or call."""
    assert run(STORM, url, prefix, str(again)) == "free"


HELD_WHILE_FORKED = """
import os, sys
from redlease.sync import LeaseLost, Redlease

client = Redlease.from_url(sys.argv[1], prefix=sys.argv[2])
lock, other = client.lock("r"), client.lock("other")


def in_child(hold):
    assert hold.lost and not hold.release() and hold.remaining() == 0 and hold.wait_lost()
    try:
        hold.check()
    except LeaseLost as error:
        assert "forked" in str(error)
    assert lock.try_acquire() is None
    with other.hold() as own:
        assert own.permit.owner.endswith(f":{os.getpid()}")


try:
    with lock.hold(on_lost="raise") as hold:
        child = os.fork()
        if child == 0:
            in_child(hold)
        else:
            status = os.waitpid(child, 0)[1]
            hold.check()
            assert lock.is_held(hold.permit)
            print("parent", status)
except LeaseLost:
    assert child == 0, "the parent lost it"
    client.close()
    sys.exit()  # as a worker of gunicorn ends
assert not lock.locked()
client.close()
"""


def test_a_child_leaves_its_parent_s_block(url: str, prefix: str) -> None:
    """The hold is lost in the child, whose way out of the block releases nothing; its client is one of its own."""
    assert run(HELD_WHILE_FORKED, url, prefix) == "parent 0"


CROWD = """
import os, sys, threading, time
from redlease.sync import Redlease

url, prefix, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
client = Redlease.from_url(url, prefix=prefix, lease=10)
pool = client.semaphore("pool", 10)
lock, inside, most, turns = threading.Lock(), 0, 0, [0] * 200
until = time.monotonic() + seconds


def work(number):
    global inside, most
    while time.monotonic() < until:
        with pool.hold() as hold:
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.001)
            with lock:
                inside -= 1
            hold.check()
        turns[number] += 1


def in_child():
    ends = time.monotonic() + seconds / 3
    while time.monotonic() < ends:
        with pool.hold() as hold:
            found = pool.inspect()
            assert sum(permit.weight for permit in found.holders) <= 10
    client.close()
    assert threading.active_count() == 1, threading.enumerate()


threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
for thread in threads:
    thread.start()
time.sleep(seconds / 3)
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        in_child()
        sys.exit()
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
for thread in threads:
    thread.join(30)
assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
client.close()
assert threading.active_count() == 1, threading.enumerate()
print(most <= 10, min(turns) > 0)
"""


def connections(raw: redis.Redis) -> int:
    """Return how many clients the server has."""
    return len(raw.client_list())


@pytest.fixture
def raw(url: str) -> Iterator[redis.Redis]:
    """A plain client."""
    with redis.Redis.from_url(url) as raw:
        yield raw


@pytest.mark.slow
def test_a_crowd_of_threads_and_forks(url: str, prefix: str, raw: redis.Redis) -> None:
    """200 threads and four children use one client: at most ten are inside, each process has one connection."""
    before, most = connections(raw), 0
    with started(CROWD, url, prefix, "9") as process:
        while process.poll() is None:
            most = max(most, connections(raw))
            time.sleep(0.01)
        out, errors = process.communicate()
    assert (process.returncode, out.strip(), errors) == (0, "True True", "")
    assert most - before == 1 + 4


ENDS = """
import sys, threading
from redlease.sync import Redlease

client = Redlease.from_url(sys.argv[1], prefix=sys.argv[2])
hold = client.lock("r").hold().acquire()
threading.Thread(target=client.lock("r").acquire, daemon=True).start()
print(hold.lost)
"""


def test_a_script_that_does_not_close_ends(url: str, prefix: str) -> None:
    """It ends at once and without a word, though it holds and a thread of it waits."""
    assert run(ENDS, url, prefix, timeout=10) == "False"


IN_GREENLETS = """
import sys
from gevent import monkey

if sys.argv[3] == "late":
    from redlease.sync import Redlease
monkey.patch_all(thread=sys.argv[3] != "without threads")

from redlease.sync import Redlease, RedleaseError

with Redlease.from_url(sys.argv[1], prefix=sys.argv[2]) as client:
    pass
"""


@pytest.mark.parametrize("how", ["early", "late", "without threads"])
def test_gevent_is_refused(url: str, prefix: str, how: str) -> None:
    """Where gevent has replaced threads or sockets, a client says so on its first use, and what to use instead."""
    with started(IN_GREENLETS, url, prefix, how) as process:
        out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    last = errors.strip().splitlines()[-1]
    assert last.startswith("redlease.errors.RedleaseError: ")
    assert "gevent has replaced them" in last
    assert "celery --pool threads" in last


def test_eventlet_is_refused(url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is with eventlet, which calls it otherwise."""
    patched = SimpleNamespace(is_monkey_patched=lambda module: module == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", cast("Any", patched))
    with pytest.raises(RedleaseError, match="eventlet has replaced them"), Redlease.from_url(url, prefix=prefix):
        pass
