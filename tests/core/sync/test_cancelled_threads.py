"""dramatiq and RQ, which cancel a job by an exception in its thread: a wait for a permit ends, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from redlease.sync import Redlease

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import OwnServer

ENDED = """
def ended(since):
    print(time.monotonic() - since < 2 or f"it ended after {time.monotonic() - since:.1f} s")
"""

IN_DRAMATIQ = """
import sys, time
import dramatiq
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Shutdown, ShutdownNotifications, TimeLimit
from dramatiq.middleware.time_limit import TimeLimitExceeded
from redlease.sync import Redlease

broker = StubBroker(middleware=[TimeLimit(interval=50), ShutdownNotifications(notify_shutdown=True)])
dramatiq.set_broker(broker)
client = Redlease.from_url(sys.argv[1])
lock = client.lock("customer")
began = stopped = 0.0


@dramatiq.actor
def charge(interruption):
    global began
    began = time.monotonic()
    try:
        with lock.hold():
            pass
    except TimeLimitExceeded:
        ended(began + 0.1)
        raise
    except Shutdown:
        ended(stopped)
        raise


def main():
    global stopped
    broker.emit_after("process_boot")
    worker = dramatiq.Worker(broker, worker_threads=1)
    worker.start()
    charge.send_with_options(args=("time limit",), time_limit=100)
    broker.join("default")
    charge.send("shutdown")
    with lock.watch() as snapshots:
        next(snapshot for snapshot in snapshots if snapshot.waiters)
    stopped = time.monotonic()
    worker.stop()
    client.close()
"""

IN_RQ = """
import sys, time
from redis import Redis
from rq import Queue, SimpleWorker
from rq.timeouts import JobTimeoutException, TimerDeathPenalty
from redlease.sync import Redlease


class Worker(SimpleWorker):
    death_penalty_class = TimerDeathPenalty


def charge():
    began = time.monotonic()
    with Redlease.from_url(sys.argv[1]) as client:
        try:
            with client.lock("customer").hold():
                pass
        except JobTimeoutException:
            ended(began + 1)
            raise


def main():
    connection = Redis.from_url(sys.argv[1])
    queue = Queue(connection=connection)
    job = queue.enqueue(charge, job_timeout=1)
    Worker([queue], connection=connection).work(burst=True, logging_level="ERROR")
    print(job.get_status().value)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "outcome"), [(IN_DRAMATIQ, ["True", "True"]), (IN_RQ, ["True", "failed"])], ids=["dramatiq", "rq"]
)
def test_a_cancelled_job_waits_no_more(own_server: OwnServer, tmp_path: Path, program: str, outcome: list[str]) -> None:
    """A time limit, and a worker that is stopped, end a wait within two seconds, and take it out of the queue."""
    url = own_server("valkey9").url
    with Redlease.from_url(url) as client, client.lock("customer").hold() as hold:
        (tmp_path / "jobs.py").write_text(ENDED + program, encoding="utf-8")
        command = [
            sys.executable,
            "-c",
            "import sys; sys.path.insert(0, sys.argv[2]); import jobs; jobs.main()",
            url,
            str(tmp_path),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.split("\n")[:-1] == outcome, done.stderr
        hold.check()
        assert not client.lock("customer").inspect().waiters
