"""Engines, clients, and the checks that hold for every test: nothing is left behind, and nothing is left out in CI."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
from typing import TYPE_CHECKING, Any, Protocol, cast

import fakeredis
import pytest
import redis.asyncio
from coverage import Coverage
from hypothesis import HealthCheck, settings

from redlease import Redlease

import garbage
from clusters import Cluster
from postgres import running_postgres
from proxy import Proxy
from repeated_timeout import pytest_timeout_set_timer  # noqa: F401
from servers import CLOCK_ENGINES, ENGINES, REAL_ENGINES, Server, available_engines, describe_engines, find_faketime
from tiers import QUICK, QUICK_ENGINES, QUICK_S, TIERS, tier_of
from traced_once import TracedOnce

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator

IN_CI = os.environ.get("CI") == "true"

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup has them ignore the terminal's end;
# every process they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A change is refused for what it does, and not for what a run happens to draw, nor for the speed of the machine:
# `make test` draws the same examples each time, and `make test-long` searches further among others.
settings.register_profile(
    "same", max_examples=300, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

_numbers = itertools.count(1)


class MakeClient(Protocol):
    """Makes a client that is entered, and left when the test ends; a ``url`` leads it elsewhere, such as to a proxy."""

    async def __call__(self, *, url: str | None = None, **options: Any) -> Redlease: ...


class OwnServer(Protocol):
    """Starts a server for one test alone, which may kill, pause or fill it."""

    def __call__(self, engine: str, *arguments: str, faketime: bool = False) -> Server: ...


class MakeProxy(Protocol):
    """Makes a proxy that listens until the test ends."""

    async def __call__(self, server: Server, *, seed: int = 0) -> Proxy: ...


# A cluster of three masters stands beside the engines in the conformance suite.
CLUSTERS = ("cluster7",) if "redis7" in available_engines() else ()


class Servers:
    """The servers that all tests share, each started when it is first asked for."""

    def __init__(self, engines: Collection[str]) -> None:
        self._engines = engines
        self._running: dict[str, Server] = {}
        self._cluster: Cluster | None = None

    def __getitem__(self, engine: str) -> Server:
        if engine not in self._running:
            self._running[engine] = self.own(engine).start()
        return self._running[engine]

    def own(self, engine: str, *arguments: str, faketime: bool = False) -> Server:
        """Return one that is not shared, and not started yet."""
        assert engine in self._engines, f"mark the test slow: {engine} is none of what `make test` has"
        return Server(engine, *arguments, faketime=faketime)

    @property
    def cluster(self) -> Cluster:
        """Three masters of Redis 7, which no test may disturb."""
        if self._cluster is None:
            assert "redis7" in self._engines, "mark the test slow: `make test` has no cluster"
            self._cluster = Cluster("redis7").start().rest()
        return self._cluster

    def url(self, engine: str) -> str:
        """Return where clients of an engine are led, with the version of RESP that the run is for."""
        url = self.cluster.url if engine in CLUSTERS else self[engine].url
        protocol = os.environ.get("REDLEASE_PROTOCOL")
        return f"{url}?protocol={protocol}" if protocol else url

    def stop(self) -> None:
        """End them all."""
        for server in self._running.values():
            server.stop()
        if self._cluster is not None:
            self._cluster.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make test` and `make test-rest` choose their tests with."""
    parser.addoption("--tier", choices=TIERS, help="run the tests of one tier only, as tests/README.md has it")
    parser.addoption(
        "--long", action="store_true", help="let the tests that `make test-long` runs take their full time"
    )
    parser.addoption("--seed", type=int, default=0, help="what those tests draw their random numbers from")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run in CI with an engine or libfaketime missing: elsewhere the report's head names what is left out.

    Under coverage, trace only what shows more lines.
    """
    if (
        config.getoption("tier") != QUICK
        and IN_CI
        and (len(available_engines()) < len(ENGINES) or find_faketime() is None)
    ):
        raise pytest.UsageError("\n".join(["CI needs every engine and libfaketime.", *describe_engines()]))
    if (tracer := Coverage.current()) is not None:
        config.pluginmanager.register(TracedOnce(tracer))
    # A process that a test starts must not find the source tree in its working directory either.
    os.environ["PYTHONSAFEPATH"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: modules and tests stay, and looking at them again took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the other tier, where one is chosen."""
    if tier := config.getoption("tier"):
        others = [item for item in items if tier_of(item) != tier]
        items[:] = [item for item in items if tier_of(item) == tier]
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """Let the collections after each test look at what came since: modules and tests are too many to look at again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    """Name the engines."""
    return describe_engines()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that are in the quick tier and should not be, unless the machine was busier than it is used to."""
    if config.getoption("tier") == QUICK:
        for report in terminalreporter.stats.get("passed", []):
            if report.duration > 2 * QUICK_S:
                terminalreporter.write_line(f"{report.nodeid} took {report.duration:.1f} s: mark it slow?", yellow=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail in CI when a test was skipped: a skipped test shows nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if IN_CI and reporter is not None and reporter.stats.get("skipped") and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line("In CI a skipped test is a failure.", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> Iterator[Servers]:
    """The shared servers by engine."""
    shared = Servers(QUICK_ENGINES if pytestconfig.getoption("tier") == QUICK else ENGINES)
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server that all tests share; whoever asks for it is marked slow."""
    with running_postgres() as url:
        yield url


@pytest.fixture(params=[*available_engines(), *CLUSTERS])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine of the conformance suite in turn."""
    return str(request.param)


@pytest.fixture(params=[engine for engine in available_engines() if engine in REAL_ENGINES])
def real_engine(request: pytest.FixtureRequest) -> str:
    """Each engine that is a process in turn, for tests of what only a process can do."""
    return str(request.param)


@pytest.fixture(params=[engine for engine in available_engines() if engine in CLOCK_ENGINES and find_faketime()])
def clock_engine(request: pytest.FixtureRequest) -> str:
    """Each engine whose clock can be stepped in turn, for `own_server(clock_engine, faketime=True).step_clock()`."""
    return str(request.param)


@pytest.fixture
def own_server(servers: Servers) -> Iterator[OwnServer]:
    """A factory of private servers."""
    with contextlib.ExitStack() as stack:
        yield lambda engine, *arguments, faketime=False: stack.enter_context(
            servers.own(engine, *arguments, faketime=faketime)
        )


@pytest.fixture
def is_long(pytestconfig: pytest.Config) -> bool:
    """Whether this is `make test-long`."""
    return bool(pytestconfig.getoption("long"))


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """What random numbers are drawn from."""
    return int(pytestconfig.getoption("seed"))


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses, so that tests need not empty the server."""
    return f"test{os.getpid()}x{next(_numbers)}"


@pytest.fixture
def fake_server() -> fakeredis.FakeServer:
    """What every fakeredis client of one test talks to."""
    return fakeredis.FakeServer()


@pytest.fixture
async def raw_client(
    engine: str, servers: Servers, fake_server: fakeredis.FakeServer
) -> AsyncIterator[Callable[..., redis.asyncio.Redis]]:
    """A factory of plain redis clients of the engine."""
    async with contextlib.AsyncExitStack() as stack:

        def make(**options: Any) -> redis.asyncio.Redis:
            client: Any  # the commands that tests give it are the same on a cluster
            if engine == "fakeredis":
                client = fakeredis.FakeAsyncRedis(server=fake_server, **options)
            elif engine in CLUSTERS:
                client = redis.asyncio.RedisCluster("127.0.0.1", servers.cluster.masters[0].port, **options)
            else:
                client = redis.asyncio.Redis.from_url(servers[engine].url, **options)
            stack.push_async_callback(client.aclose)
            return cast("redis.asyncio.Redis", client)

        yield make


@pytest.fixture
def raw(raw_client: Callable[..., redis.asyncio.Redis]) -> redis.asyncio.Redis:
    """A plain redis client of the engine, for looking at keys."""
    return raw_client(decode_responses=True)


@pytest.fixture
async def make_proxy(own_server: OwnServer) -> AsyncIterator[MakeProxy]:
    """A factory of proxies in front of a server."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(server: Server, *, seed: int = 0) -> Proxy:
            return await stack.enter_async_context(Proxy(server.port, seed=seed))

        yield make


@pytest.fixture
def server(servers: Servers, real_engine: str) -> Server:
    """A server of each real engine in turn, which all tests share."""
    return servers[real_engine]


@pytest.fixture
async def proxy(server: Server, make_proxy: MakeProxy) -> Proxy:
    """A proxy in front of it, without faults as yet."""
    return await make_proxy(server)


@pytest.fixture
def client_of_engine(
    engine: str, servers: Servers, raw_client: Callable[..., redis.asyncio.Redis]
) -> Callable[..., Redlease]:
    """Makes a client of the engine that is not entered yet."""
    if engine == "fakeredis":
        return lambda **options: Redlease(raw_client(), **options)
    return lambda **options: Redlease.from_url(servers.url(engine), **options)


@pytest.fixture
def client_by_default(request: pytest.FixtureRequest) -> Callable[..., Redlease] | None:
    """Spares a test that gives every URL itself from running once for each engine."""
    wanted: Callable[..., Redlease] | None = None
    if "engine" in request.fixturenames:
        wanted = request.getfixturevalue("client_of_engine")
    return wanted


@pytest.fixture
async def make_client(
    client_by_default: Callable[..., Redlease] | None, prefix: str, make_proxy: MakeProxy
) -> AsyncIterator[MakeClient]:
    """A factory of clients of the engine, or of any server by its URL; they are left before any server is stopped."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*, url: str | None = None, **options: Any) -> Redlease:
            options = {"prefix": prefix} | options
            if url is not None:
                client = Redlease.from_url(url, **options)
            else:
                assert client_by_default is not None, "ask for the fixture `engine` as well, or give a URL"
                client = client_by_default(**options)
            return await stack.enter_async_context(client)

        yield make


@pytest.fixture
async def client(engine: str, make_client: MakeClient) -> Redlease:
    """A client of the engine."""
    return await make_client()


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """Fail a test that leaves a task running, or an exception that only the event loop's handler has seen."""
    problems: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(f"{context.get('exception')!r}: {context}"))
    yield
    for _ in range(10):
        # What was cancelled or closed last needs a few turns to end.
        await asyncio.sleep(0)
    problems += [f"left running: {task!r}" for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    garbage.collect()
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
