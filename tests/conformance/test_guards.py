"""The guard in Redis: it takes fences in order, and runs scripts under a fence that is not stale."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Guard, RedleaseError, StaleFence

from helpers import keys_of

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease

    from conftest import MakeClient

ADD = "return redis.call('INCRBY', KEYS[1], ARGV[1])"


@pytest.fixture
def guard(client: Redlease) -> Guard:
    """A guard that has seen nothing yet."""
    return client.guard("ledger")


async def key_of(raw: redis.asyncio.Redis, prefix: str) -> str:
    """Return the one key that the guard has."""
    (key,) = await keys_of(raw, f"{prefix}:*")
    return key


async def test_a_lower_fence_is_refused(guard: Guard) -> None:
    """A fence as high as the highest seen passes, repeated too; a lower one is told what was seen."""
    for fence in (5, 5, 7, 7):
        await guard.check(fence)
    for fence in (6, 5, 1):
        with pytest.raises(StaleFence, match=f"resource 'ledger': fence {fence} is stale, since 7 was seen") as refused:
            await guard.check(fence)
        assert (refused.value.resource, refused.value.fence, refused.value.seen) == ("ledger", fence, 7)
    await guard.check(7)


async def test_fences_are_compared_to_the_last_digit(guard: Guard) -> None:
    """Microseconds have sixteen digits, and neighbours are told apart, as far as a double can tell them."""
    for fence in (1_795_342_886_845_427, 9_007_199_254_740_990):
        await guard.check(fence)
        await guard.check(fence + 1)
        with pytest.raises(StaleFence) as refused:
            await guard.check(fence)
        assert refused.value.seen == fence + 1


async def test_a_holder_that_was_replaced_is_refused(client: Redlease, guard: Guard) -> None:
    """The fences of a lock's holders pass in the order of their grants."""
    lock = client.lock("ledger")
    async with lock.hold() as first:
        await guard.check(first.fence)
    async with lock.hold() as second:
        await guard.check(second.fence)
        with pytest.raises(StaleFence):
            await guard.check(first.fence)


@pytest.mark.usefixtures("engine")
async def test_guards_of_one_name_are_one(make_client: MakeClient) -> None:
    """Every client sees what any has seen; another name is another guard."""
    one, other = await make_client(), await make_client()
    await one.guard("a {b} %").check(9)
    with pytest.raises(StaleFence):
        await other.guard("a {b} %").check(8)
    await other.guard("a").check(8)


@pytest.mark.of_tasks("tasks that begin together ask in their order, threads in any")
async def test_of_many_checks_at_once_none_passes_after_a_higher_one(guard: Guard) -> None:
    """Those that passed did so in order, and the highest was among them."""
    passed: list[int] = []

    async def check(fence: int) -> None:
        passed.extend(await guard.run(fence, "return {tonumber(ARGV[1])}", args=[fence]))

    fences = [(number * 37) % 101 + 1 for number in range(101)]
    outcomes = await asyncio.gather(*map(check, fences), return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, StaleFence) for outcome in outcomes)
    assert passed == sorted(passed)
    assert passed[-1] == 101


@pytest.mark.parametrize("fence", [0, -1, 2**53, 1.0, "5", None, True])
async def test_what_is_no_fence_is_refused_unasked(guard: Guard, fence: Any) -> None:
    """It is a mistake of the caller, and no server is asked."""
    with pytest.raises(ValueError, match=r"a fence is a whole number from 1 to 2\*\*53 - 1"):
        await guard.check(fence)
    with pytest.raises(ValueError, match="a fence is a whole number"):
        await guard.run(fence, "return 1")


async def test_the_key_outlives_the_time_in_the_fence(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """It expires `idle_ttl` after the later of now and the fence's time, and that never moves back."""
    await client.guard("g", idle_ttl=60).check(1)
    key = await key_of(raw, prefix)
    soon = await raw.pttl(key)
    assert 50_000 < soon <= 60_000
    seconds, micros = await raw.time()
    ahead = (seconds + 3600) * 1_000_000 + micros
    await client.guard("g", idle_ttl=60).check(ahead)
    far = await raw.pttl(key)
    assert 3_650_000 < far <= 3_660_000
    await client.guard("g", idle_ttl=1).check(ahead)
    await client.guard("g", idle_ttl=1).check(ahead + 1)
    assert 3_650_000 < await raw.pttl(key) <= far


async def test_a_script_runs_on_its_own_keys_and_arguments(guard: Guard, raw: redis.asyncio.Redis, prefix: str) -> None:
    """KEYS and ARGV are the caller's, counted from one, bytes and numbers included; so is the reply."""
    keys = [f"{prefix}:{guard.hash_tag}:{number}" for number in range(2)]
    script = "return {KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], #KEYS, #ARGV, {}, 'x'} -- a comment at the end"
    reply = await guard.run(5, script, [keys[0], keys[1].encode()], ["ä", b"\xff\x00", 2.5])
    assert reply == [keys[0].encode(), keys[1].encode(), "ä".encode(), b"\xff\x00", b"2.5", 2, 3, [], b"x"]
    assert await guard.run(5, ADD, keys[:1], [3]) == 3
    assert await guard.run(6, ADD, keys[:1], [4]) == 7
    assert await raw.get(keys[0]) == "7"
    assert await guard.run(6, "redis.call('DEL', KEYS[1])", keys[:1]) is None
    assert await guard.run(6, "return redis.call('GET', KEYS[1])", keys[:1]) is None
    assert await guard.run(6, "return {ok = 'FINE'}") == b"FINE"


async def test_nothing_of_a_script_runs_under_a_stale_fence(
    guard: Guard, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """The check and the script are one step, and the script's fence counts for later checks."""
    key = f"{prefix}:{guard.hash_tag}:balance"
    await guard.run(5, ADD, [key], [3])
    with pytest.raises(StaleFence):
        await guard.run(4, ADD, [key], [100])
    with pytest.raises(StaleFence):
        await guard.check(4)
    assert await raw.get(key) == "3"


@pytest.mark.parametrize(
    ("lua", "said"),
    [
        ("error('nothing to sell')", "1: nothing to sell"),
        ("\n\nerror({err = 'nothing to sell'})", "nothing to sell"),
        ("return redis.error_reply('SOLD out')", "SOLD out"),
        ("redis.call('SET', KEYS[1], 'x')\nredis.call('INCR', KEYS[1])", "not an integer"),
    ],
)
async def test_a_script_that_fails_says_why(guard: Guard, prefix: str, lua: str, said: str) -> None:
    """Its error names the resource, and the guard goes on."""
    with pytest.raises(RedleaseError, match="resource 'ledger': the script failed, and what it") as failed:
        await guard.run(5, lua, [f"{prefix}:{guard.hash_tag}:k"])
    assert said in str(failed.value)
    assert not isinstance(failed.value, StaleFence)
    await guard.check(5)


async def test_a_script_that_is_no_lua_changes_nothing(guard: Guard) -> None:
    """The server refuses it whole, the check included."""
    with pytest.raises(RedleaseError, match="nothing was changed"):
        await guard.run(9, "return return")
    await guard.check(5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lua": "#!lua\nreturn 1"}, "without a #! line"),
        ({"lua": b"return 1"}, "Lua as a string"),
        ({"keys": "key"}, r"keys must be a list of str \| bytes, not"),
        ({"keys": [5]}, r"keys must be a list of str \| bytes, not"),
        ({"args": [None]}, r"args must be a list of str \| bytes \| int \| float, not"),
        ({"args": [True]}, r"args must be a list of str \| bytes \| int \| float, not"),
    ],
)
async def test_a_call_that_cannot_be_is_refused_unasked(guard: Guard, wrong: dict[str, Any], said: str) -> None:
    """It is a mistake of the caller, and no server is asked."""
    given: dict[str, Any] = {"lua": "return 1"} | wrong
    with pytest.raises(ValueError, match=said):
        await guard.run(5, **given)
    await guard.check(1)


async def test_a_key_in_another_slot_is_refused_unasked_on_a_cluster(client: Redlease, engine: str) -> None:
    """A script runs in one slot; elsewhere any key will do."""
    guard = client.guard("ledger")
    if engine == "cluster7":
        with pytest.raises(ValueError, match=r"key 'elsewhere' is in another slot .* name it with '\{ledger\}'"):
            await guard.run(5, "return 1", ["elsewhere"])
        await guard.check(1)
    else:
        assert await guard.run(5, "return 1", ["elsewhere"]) == 1


async def test_a_guard_works_on_a_server_that_does_not_know_its_script(
    client: Redlease, raw: redis.asyncio.Redis, engine: str
) -> None:
    """It is told the script then, on every master of a cluster, whenever the client was connected to it."""
    names = [f"r{number}" for number in range(6)]
    for name in names:
        assert not await client.lock(name).locked()
    for fence in (5, 6):
        everywhere = {"target_nodes": "primaries"} if engine == "cluster7" else {}
        await raw.execute_command("SCRIPT FLUSH", **everywhere)  # type: ignore[no-untyped-call]
        for name in names:
            await client.guard(name).check(fence)
    with pytest.raises(StaleFence):
        await client.guard(names[0]).check(5)
