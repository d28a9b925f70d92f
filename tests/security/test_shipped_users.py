"""What the users of the ACL file may do besides: each command of each server is tried, by itself and from a script."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis import exceptions

from redlease._core.protocol import rights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import OwnServer
    from servers import Server

FILE = Path(__file__).parents[2] / "examples" / "acl" / "redlease.acl"
USERS = {"client": rights.CLIENT, "reader": rights.READER}
SECRET = "s3cr3t-of-the-test"
# Commands without keys and channels, and AUTH and its like, which every user has.
UNBOUND = {"auth", "eval", "evalsha", "hello", "info", "quit", "reset", "scan", "script|load", "select", "time"}
UNBOUND |= {"unsubscribe", "wait"}
# What each may see beyond the prefix, as docs/security.md has it.
SEEN = {"client": set[str](), "reader": {"scan"}}
REFUSALS = (
    "NOPERM",
    "no permission",
    "can't run this command",
    "can't access",
    "can't publish",
    "not allowed from script",
    "ACL failure",
)

TRY_ALL = """
local done = {}
for _, text in ipairs(ARGV) do
  local words = cjson.decode(text)
  local reply = redis.pcall(unpack(words))
  done[#done + 1] = cjson.encode({words[1], type(reply) == 'table' and reply.err or '', cjson.encode(reply)})
end
return done
"""


def test_the_file_as_shipped_lets_nobody_in(own_server: OwnServer, real_engine: str) -> None:
    """Loaded as it is, beside a password of the server: nobody gets in without one, nor with that one."""
    server = own_server(real_engine, "--requirepass", SECRET, "--aclfile", str(FILE))
    logins: tuple[dict[str, Any], ...] = (
        {},
        {"password": SECRET},
        *(
            {"username": name, "password": word}
            for name in ("default", *map("redlease-{}".format, USERS))
            for word in ("", SECRET)
        ),
    )
    for login in logins:
        with redis.Redis.from_url(server.unix_url, **login) as stranger, pytest.raises(exceptions.AuthenticationError):
            stranger.ping()


@pytest.fixture
def server(own_server: OwnServer, real_engine: str, tmp_path: Path) -> Server:
    """A server with the users of the file, and with what is not redlease's: settings, keys, a user, a slow command."""
    file = tmp_path / "redlease.acl"
    users = FILE.read_text().replace(" off resetchannels ~", " on >pw resetchannels ~")
    file.write_text(users.replace("user default off", "user default on nopass ~* &* +@all"))
    settings = ["--aclfile", str(file), "--masterauth", SECRET, "--slowlog-log-slower-than", "0"]
    if real_engine != "redis62":  # later servers refuse these to everybody by default
        settings += ["--enable-debug-command", "yes", "--enable-module-command", "yes"]
    server = own_server(real_engine, *settings)
    server.cli("ACL", "SETUSER", f"user-{SECRET}", "on", f">{SECRET}", "~*", "+@all")
    server.cli("SET", f"other:{SECRET}", SECRET)
    server.cli("HSET", f"other:hash-{SECRET}", "field", SECRET)
    return server


@contextlib.contextmanager
def session(server: Server, user: str) -> Iterator[Any]:
    """A connection of a user of the file."""
    make: Any = redis.UnixDomainSocketConnection  # abstract and untyped, to a type checker
    connection = make(
        path=server.unix_url.removeprefix("unix://"),
        username=f"redlease-{user}",
        password="pw",
        socket_timeout=2,
        protocol=2,
    )
    try:
        yield connection
    finally:
        connection.disconnect()


def ask(connection: Any, *words: str) -> Any:
    """Return the reply to a command, or the error."""
    connection.send_command(*words)
    try:
        return connection.read_response()
    except (exceptions.ResponseError, exceptions.ConnectionError) as error:
        return error


def attempts(server: Server) -> Iterator[tuple[str, list[str]]]:
    """Yield each command and subcommand of the server, on a key of somebody else where it has one."""
    every = server.cli("COMMAND")
    for info in every.values():
        for each in [_parsed(raw) for raw in info.get("subcommands") or ()] or [info]:
            arguments = ["1"] * (abs(each["arity"]) - len(each["name"].split("|")))
            first, step = each["first_key_pos"], each["step_count"]
            last = each["last_key_pos"] if each["last_key_pos"] > 0 else first
            offset = len(each["name"].split("|"))
            for at in range(first, last + 1, step) if first else ():
                arguments[at - offset : at - offset + 1] = [f"other:{SECRET}"]
            yield each["name"], [*each["name"].split("|"), *arguments]
    yield "scan", ["scan", "0"]
    for name in ("publish", "spublish", "subscribe", "ssubscribe", "psubscribe"):
        if name in every:
            yield name, [name, "other:channel", *["1"] * name.endswith("publish")]


def _parsed(info: list[Any]) -> dict[str, Any]:
    name, arity, _, first, last, step = info[:6]
    return {"name": name, "arity": arity, "first_key_pos": first, "last_key_pos": last, "step_count": step}


def is_refused(text: str) -> bool:
    """Return whether an error is the server's refusal for lack of a right."""
    return any(each.lower() in text.lower() for each in REFUSALS)


def world(server: Server) -> list[Any]:
    """Return what is not redlease's, to compare it."""
    with redis.Redis.from_url(server.unix_url) as raw:
        keys = {key: raw.dump(key) for key in raw.keys("other:*")}
    return [keys, server.cli("DBSIZE"), server.cli("ACL", "LIST"), server.cli("CONFIG", "GET", "*")]


@pytest.mark.parametrize("user", USERS)
def test_no_command_shows_or_changes_what_is_not_redleases(server: Server, user: str) -> None:
    """Each is refused on another's key or channel; the few without any show nothing of others but what the docs say."""
    tried, before, shown, allowed = list(attempts(server)), world(server), set(), set()
    for name, words in tried:
        with session(server, user) as connection:
            reply = ask(connection, *words)
        if not is_refused(str(reply)):
            allowed.add(name)
        if not isinstance(reply, Exception) and SECRET in str(reply):
            shown.add(name)
    assert len(tried) > 200
    assert allowed <= UNBOUND, allowed - UNBOUND
    assert shown == SEEN[user]
    assert world(server) == before


@pytest.mark.parametrize("user", USERS)
def test_a_script_gives_no_more_rights(server: Server, user: str) -> None:
    """From a script that the user has loaded, each command is refused as well."""
    tried, before = list(attempts(server)), world(server)
    with session(server, user) as connection:
        sha = ask(connection, "SCRIPT", "LOAD", TRY_ALL)
        done = [
            json.loads(each)
            for each in ask(connection, "EVALSHA", sha, "0", *(json.dumps(words) for _, words in tried))
        ]
    allowed = {name.lower() for name, error, _ in done if not is_refused(error)}
    assert not allowed - {each.split("|")[0] for each in UNBOUND}, done
    assert not [name for name, error, reply in done if not error and SECRET in reply and name not in SEEN[user]]
    assert world(server) == before


@pytest.mark.parametrize("change", ["redis.call = print", "string.format = 1", "redis = nil", "x = 1"])
def test_a_script_changes_nothing_for_the_scripts_of_others(server: Server, change: str) -> None:
    """All scripts share what Lua has; a script that changes it would run in place of one of a user with more rights."""
    with session(server, "reader") as connection:
        sha = ask(connection, "SCRIPT", "LOAD", change)
        assert isinstance(ask(connection, "EVALSHA", sha, "0"), exceptions.ResponseError)
