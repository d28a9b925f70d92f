"""A client that is made before a fork, as at the top of a module, is a client of its own in each process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Servers

pytestmark = pytest.mark.slow

CHILDREN, ROUNDS = 4, 25

MODULE = """
import asyncio, json, os
from redlease import Redlease

client = Redlease.from_url(os.environ["URL"], prefix=os.environ["PREFIX"], lease=10)
pools = {1: client.lock("one"), 3: client.semaphore("three", 3)}


async def take(capacity, said):
    async with pools[capacity].hold(timeout=60) as hold:
        # The server's own view is asked too: what this process counts is its part of it.
        found = await pools[capacity].inspect()
        in_use = sum(permit.weight for permit in found.holders)
        said.append([capacity, hold.fence, in_use, hold.permit.owner, os.getpid()])
        fence = hold.fence
    assert not hold.lost, (capacity, fence)  # its release found it held


async def main(rounds):
    said = []
    async with client:
        for _ in range(rounds):
            await asyncio.gather(take(1, said), take(3, said))
    return said


def child(rounds, queue):
    try:
        queue.put(asyncio.run(main(rounds)))
    except BaseException as error:
        queue.put(repr(error))
        raise


async def app(scope, receive, send):
    # The client is entered as the worker begins and left as it ends.
    if scope["type"] == "lifespan":
        await receive()
        async with client:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    said = []
    await take(int(scope["path"].strip("/")), said)
    body = json.dumps(said[0]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
"""

IN_THREADS = """
import json, os
from redlease.sync import Redlease

client = Redlease.from_url(os.environ["URL"], prefix=os.environ["PREFIX"], lease=10)
pools = {1: client.lock("one"), 3: client.semaphore("three", 3)}
# The parent holds something when it forks its workers, in each of which that is lost.
held_by_parent = client.lock("parent").hold().acquire()


def app(environ, start_response):
    capacity = int(environ["PATH_INFO"].strip("/"))
    with pools[capacity].hold(timeout=60) as hold:
        found = pools[capacity].inspect()
        said = [capacity, hold.fence, found.in_use, hold.permit.owner, os.getpid()]
    assert held_by_parent.lost
    start_response("200 OK", [("content-type", "application/json"), ("connection", "close")])
    return [json.dumps(said).encode()]
"""

PROGRAM = """
import json, multiprocessing, sys
import made_early as module

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    children = [context.Process(target=module.child, args=(int(sys.argv[3]), queue)) for _ in range(int(sys.argv[2]))]
    for each in children:
        each.start()
    said = [queue.get(timeout=60) for _ in children]
    for each in children:
        each.join()
    print(json.dumps([said, [each.exitcode for each in children]]))
"""


def judge(said: list[list[Any]]) -> None:
    """Fail unless every grant has a fence of its own, nobody saw more inside than fit, and owners are who held."""
    for capacity in (1, 3):
        grants = [entry for entry in said if entry[0] == capacity]
        fences = [fence for _, fence, *_ in grants]
        assert len(set(fences)) == len(fences), f"of {len(fences)} grants only {len(set(fences))} have their own fence"
        assert all(in_use <= capacity for _, _, in_use, *_ in grants)
        assert all(owner.endswith(f":{pid}") for *_, owner, pid in grants)


@pytest.fixture
def environment(servers: Servers, prefix: str, tmp_path: Path) -> dict[str, str]:
    """Where the programs find the module and the server."""
    (tmp_path / "made_early.py").write_text(MODULE)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "URL": servers.url("valkey9"), "PREFIX": prefix, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_of_multiprocessing(environment: dict[str, str], tmp_path: Path, method: str) -> None:
    """Four children, each of which enters the client that their parent made, exclude each other."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), method, str(CHILDREN), str(ROUNDS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    said, exits = json.loads(done.stdout)
    assert exits == [0] * CHILDREN, done.stderr
    assert all(isinstance(child, list) for child in said), said
    grants = [entry for child in said for entry in child]
    assert len(grants) == CHILDREN * ROUNDS * 2
    judge(grants)


def ask(port: int, capacity: int) -> list[Any]:
    """What one request to the service says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{capacity}", timeout=30) as reply:
        said: list[Any] = json.load(reply)
        return said


@pytest.mark.parametrize(
    ("module", "workers"),
    [(MODULE, ["uvicorn_worker.UvicornWorker"]), (IN_THREADS, ["gthread", "--threads", "5"]), (IN_THREADS, ["sync"])],
    ids=["asyncio", "threads", "blocking"],
)
def test_gunicorn_with_preload(environment: dict[str, str], tmp_path: Path, module: str, workers: list[str]) -> None:
    """Four workers of gunicorn, which imports the application before it forks them, answer 400 requests."""
    (tmp_path / "made_early.py").write_text(module)
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "gunicorn", "made_early:app", "--preload", "--workers", "4", "--bind"]
    command += [f"127.0.0.1:{port}", "--log-file", str(log), "--worker-class", *workers]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as service:
        try:
            until_answered(port, service, log)
            with ThreadPoolExecutor(20) as callers:
                said = list(callers.map(lambda number: ask(port, 3 if number % 2 else 1), range(400)))
        finally:
            service.terminate()
            service.wait(timeout=20)
    assert len(said) == 400
    assert len({pid for *_, pid in said}) > 1, "one worker has answered everything"
    judge(said)
    assert "Traceback" not in log.read_text()


def until_answered(port: int, service: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the service answers."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            ask(port, 1)
            return
        assert service.poll() is None, log.read_text()
        time.sleep(0.1)
    pytest.fail(f"gunicorn has not answered: {log.read_text()}")


FORKS_AS_IT_HOLDS = """
import asyncio, json, os, sys
from redlease import Redlease, RedleaseError

url, prefix = sys.argv[1:]
early = Redlease.from_url(url, prefix=prefix)


async def in_child():
    try:
        await early.lock("held").try_acquire()
        refused = False
    except RedleaseError:
        refused = True
    async with Redlease.from_url(url, prefix=prefix) as client:
        inside = await client.lock("held").try_acquire()
        async with client.lock("other", lease=10) as hold:
            return refused, inside, hold.fence


async def main():
    async with early as client, client.lock("held", lease=10) as hold:
        other, awaited = client.lock("other", lease=10), client.lock("awaited")
        before = await awaited.acquire()
        waiting = asyncio.create_task(awaited.acquire())
        while not (await awaited.inspect()).waiters:
            pass
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, json.dumps(asyncio.run(in_child())).encode())
            os._exit(0)
        os.close(writing)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, os.waitpid, child, 0)
        refused, inside, fence = json.loads(os.read(reading, 1000))
        assert refused and inside is None, (refused, inside)
        hold.check()
        async with other as own:
            assert own.fence > fence
        assert await awaited.release(before)
        assert await awaited.release(await waiting)
        print("held", await client.lock("held").is_held(hold.permit))


asyncio.run(main())
"""


def test_a_child_forked_while_its_parent_holds_and_waits(servers: Servers, prefix: str) -> None:
    """The child is refused its parent's client, and excluded by what the parent holds; the parent goes on."""
    command = [sys.executable, "-c", FORKS_AS_IT_HOLDS, servers.url("valkey9"), prefix]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.strip() == "held True", done.stderr
