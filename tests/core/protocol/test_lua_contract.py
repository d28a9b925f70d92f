"""The scripts keep to what their heads and scripts.py say of them: arguments, replies, keys, and no global variable."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from lupa import lua51

import redlease
from redlease._core.primitives import checkpoints
from redlease._core.protocol import scripts
from redlease._core.protocol.replies import Granted, HeartbeatReply, Queued, Status
from redlease.guards import redis as guards
from redlease_temporal._backends.redis import registry

FILES = {
    path.name.removesuffix(".lua"): path.read_text()
    for path in Path(redlease.__file__).parent.glob("_core/lua/**/*.lua")
}
OPERATIONS = {
    script.name: script for script in (*scripts.SCRIPTS, scripts.ACQUIRE_FOR_KEY, scripts.PROBE, scripts.DELIVER)
}
PARTS = FILES.keys() - OPERATIONS.keys()  # put before or into the operations

# The fields of the header by their names, without what the scripts note beside them.
HEADER = {
    name: field for name, field in re.findall(r"^  (\w+) = (.+?),", FILES["header"], re.MULTILINE) if field != "NOTE"
}

# The adapter's have a prelude of their own, in each of them, and other keys.
ADAPTER_FILES = {
    path.name.removesuffix(".lua"): path.read_text()
    for path in resources.files("redlease_temporal._backends.redis").joinpath("lua").iterdir()
}
ADAPTER_OPERATIONS = {script.name: script for script in registry.SCRIPTS}
ADAPTER_KEYS = ("records", "owners", "relays")

# Those of the primitives have the same prelude and parts, and further keys.
PRIMITIVE_FILES = {
    path.name.removesuffix(".lua"): path.read_text()
    for path in resources.files("redlease._core.primitives").joinpath("lua").iterdir()
}
PRIMITIVE_OPERATIONS = {script.name: script for script in checkpoints.SCRIPTS}
PRIMITIVE_KEYS = {script.name: "checkpoints" for script in checkpoints.SCRIPTS}

KEYS = ("state", "holders", "queue", "waiters")
# The one key that is not declared; the prelude says why.
HISTORY = "local history = string.sub(state, 1, -6) .. 'history'"
WITHOUT_KEY = {"TIME", "PUBLISH", "SPUBLISH"}
KNOWN = {
    "redis",
    "cjson",
    "KEYS",
    "ARGV",
    "tonumber",
    "tostring",
    "ipairs",
    "pairs",
    "math",
    "string",
    "table",
    "type",
    "unpack",
}

GETGLOBAL, SETGLOBAL = 5, 7


def head(name: str, files: Mapping[str, str] = FILES) -> str:
    """Return the comment that a file begins with, without its dashes."""
    lines = []
    for line in files[name].splitlines():
        if not line.startswith("--") or line.startswith("--#"):
            break
        lines.append(line.removeprefix("--").removeprefix(" "))
    return "\n".join(lines)


def section(name: str, title: str, files: Mapping[str, str] = FILES) -> str:
    """Return what the head says under a title, such as ``ARGV``."""
    found = re.search(rf"^{title}: (.*(?:\n +.*)*)", head(name, files), re.MULTILINE)
    assert found, f"{name}.lua has no line {title}"
    return found[1]


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_says_what_it_is_for(name: str) -> None:
    """A head begins with the file's name and its purpose."""
    assert re.match(rf"{name}: \w.{{10}}", head(name))


def test_every_file_is_used() -> None:
    """Each file is an operation of scripts.py or a part of one."""
    assert OPERATIONS.keys() <= FILES.keys()
    for part in PARTS - {"header"}:
        body = scripts.sent(FILES[part])
        assert any(body in script.text for script in OPERATIONS.values()), f"{part}.lua is used by nothing"


# The header


def test_fields_of_the_header_are_read_by_name() -> None:
    """No file has a position in the reply, and no text that is sent has a name in its place, or an include."""
    for name, text in FILES.items():
        assert not re.search(r"\bwas\[\d", strip_comments(text)), name
        assert not re.search(r"'HMGET', state, '\w'[,)]", strip_comments(text)), name
    for script in (*OPERATIONS.values(), *PRIMITIVE_OPERATIONS.values()):
        assert not re.search(rf"\bwas\.(?:{'|'.join(HEADER)})\b|read_header|HEADER_SIZE|--#", script.text), script.name


def test_every_field_of_the_header_has_one_name() -> None:
    """Two names are two fields, and the protocol's page tells of each."""
    assert len(set(HEADER.values())) == len(HEADER)
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    table = page.partition("\nFields of the header")[2].partition("\n\nThe record")[0]
    assert set(re.findall(r"`'?(\w)'?`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))) == {
        field.strip("'") for name, field in HEADER.items() if name != "record"
    }


def test_a_position_is_that_of_the_files_own_header() -> None:
    """A file that reads some fields has their positions; any other file has those of state.lua."""
    own = "local was = read_header('expires',\n'record')\nreturn was.record, was.is_due, HEADER_SIZE"
    assert scripts.sent(own) == "local was = call('HMGET', state, 'k', 't' .. ticket)\nreturn was[2], was.is_due, 2\n"
    assert scripts.sent("return was.fence") == "return was[1]\n"


@pytest.mark.parametrize("lua", ["return was.fense", "local was = read_header('expires')\nreturn was.fence"])
def test_a_name_that_is_not_read_is_an_error(lua: str) -> None:
    """The loader refuses a name that is none, and one of a field that the file does not read."""
    with pytest.raises((KeyError, ValueError), match="fen"):
        scripts.sent(lua)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_head_of_an_operation_is_complete(name: str) -> None:
    """KEYS, ARGV, Reply and Cost are told; KEYS and ARGV as scripts.py sends them."""
    assert section(name, "KEYS").split() == list(KEYS)
    assert section(name, "ARGV").split("\n")[0].split() == list(OPERATIONS[name].args)
    assert section(name, "Reply").startswith("{tag")
    assert re.search(r"O\(.+\)", section(name, "Cost"))


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_argument_is_used(name: str) -> None:
    """An operation reads each of its arguments, and no further one."""
    text = strip_comments(FILES[name])
    assert {int(number) for number in re.findall(r"ARGV\[(\d+)\]", text)} == set(
        range(1, len(OPERATIONS[name].args) + 1)
    ), text[:200]


def strip_comments(text: str) -> str:
    """Return the code without what stands behind two dashes."""
    return re.sub(r"--.*", "", text)


def test_the_numbers_of_the_statuses() -> None:
    """prelude.lua and replies.Status give each status the same number."""
    found = re.search(r"^local ([A-Z_, ]+) = ([\d, ]+)$", FILES["prelude"], re.MULTILINE)
    assert found
    names, numbers = found[1].split(", "), map(int, found[2].split(", "))
    assert dict(zip(names, numbers, strict=True)) == {status.name: status.value for status in Status}


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_replies_are_those_of_the_head(name: str) -> None:
    """Every status that an operation returns is in its head, and the other way round."""
    names = "|".join(status.name for status in Status)
    told = set(re.findall(rf"\{{tag, ({names})\b", section(name, "Reply")))
    text = FILES[name].replace("--#include room\n", scripts.read_lua("redlease._core", "parts/room"))
    returned = set(re.findall(rf"\{{tag, ({names})\b", strip_comments(text)))
    assert told == returned


def reply_fields(name: str, status: str | None) -> list[str]:
    """Return what the head says to follow the tag and the status."""
    pattern = rf"\{{tag, {status}\b,? ?([^}}]*)\}}" if status else r"\{tag,? ?([^}]*)\}"
    found = re.search(pattern, section(name, "Reply"))
    assert found
    return [word.strip() for word in found[1].split(",") if word.strip()]


def test_replies_are_read_as_the_scripts_reply() -> None:
    """The named tuples of replies.py have as many fields as the heads tell."""
    assert len(reply_fields("acquire", "GRANTED")) == len(Granted._fields)
    assert len(reply_fields("acquire", "QUEUED")) == len(Queued._fields)
    assert len(reply_fields("beat", "QUEUED")) == len(HeartbeatReply._fields)


# Keys


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_key_is_declared(name: str) -> None:
    """A script touches nothing but its four KEYS, which the prelude names, and the history."""
    text = strip_comments(FILES[name])
    known = {*KEYS, *({"history"} if HISTORY in text else ())}
    for given in re.findall(r"\bbehind\(([^,]+),", text):
        assert given in ({"entries"} if name == "behind" else KEYS)  # what its calls give it
    known |= {"entries"} if name == "behind" else set()
    for command, key in re.findall(r"(?:\bcall|redis\.p?call|\btry)\('([A-Z]+)'(?:, *([^,()]+))?", text):
        if command not in WITHOUT_KEY:
            assert key.strip() in known or re.fullmatch(r"KEYS\[(?:[1-4]|i)\]", key.strip()), f"{command} {key}"
    for line in text.splitlines():
        assert (
            not re.search(r"\b(?:call|pcall|try)\((?!'|\.\.\.\))", line.replace("unpack(", "")) or "unpack" in line
        ), line


def test_the_names_of_the_keys_are_never_assigned() -> None:
    """state, holders, queue and waiters are what the prelude takes from KEYS, everywhere."""
    assert "local state, holders, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]" in FILES["prelude"]
    for name, text in FILES.items():
        code = strip_comments(text).replace("local state, holders, queue, waiters = KEYS", "")
        assert not re.search(r"(?:local |^|, )(?:state|holders|queue|waiters)(?:, \w+)* =(?!=)", code, re.MULTILINE), (
            name
        )
        assert not re.search(r"function [\w.]*\([^)]*\b(?:state|holders|queue|waiters)\b", code), name


# The primitives' scripts


def test_every_file_of_the_primitives_is_an_operation() -> None:
    """Each file is a script of one of them, under its own digest, beside those of the core."""
    assert PRIMITIVE_FILES.keys() == PRIMITIVE_OPERATIONS.keys()
    every = [*OPERATIONS.values(), *PRIMITIVE_OPERATIONS.values()]
    assert len({script.sha for script in every}) == len(every)


@pytest.mark.parametrize("name", sorted(PRIMITIVE_OPERATIONS))
def test_an_operation_of_a_primitive_keeps_its_contract(name: str) -> None:
    """Purpose, KEYS, ARGV, Reply and Cost are told; it reads its arguments, and touches its own key beside the four."""
    text, script = strip_comments(PRIMITIVE_FILES[name]), PRIMITIVE_OPERATIONS[name]
    assert re.match(rf"{name}: \w.{{10}}", head(name, PRIMITIVE_FILES))
    assert section(name, "KEYS", PRIMITIVE_FILES).split() == [*KEYS, PRIMITIVE_KEYS[name]]
    assert section(name, "ARGV", PRIMITIVE_FILES).split("\n")[0].split() == list(script.args)
    assert section(name, "Reply", PRIMITIVE_FILES).startswith("{tag")
    assert re.search(r"O\(.+\)", section(name, "Cost", PRIMITIVE_FILES))
    assert set(map(int, re.findall(r"ARGV\[(\d+)\]", text))) == set(range(1, len(script.args) + 1))
    assert f"local {PRIMITIVE_KEYS[name]} = KEYS[5]" in text
    for command, key in re.findall(r"\bcall\('([A-Z]+)'(?:, *([^,()]+))?", text):
        assert key.strip() in {*KEYS, PRIMITIVE_KEYS[name]}, f"{command} {key}"
    functions = compiled(script.text).functions
    assert set().union(*(function.writes for function in functions)) == set()
    assert set().union(*(function.reads for function in functions)) <= KNOWN
    assert "\t" not in text
    assert b"\r\n$1\r\n5\r\n" in script.head


# Globals: Redis lets a script read unknown ones as an error, and writing one fails only where it is run.


@dataclass
class Function:
    """What is of interest in a compiled function of Lua 5.1."""

    constants: list[Any] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


class Chunk:
    """Reads the precompiled form of Lua 5.1."""

    def __init__(self, data: bytes) -> None:
        assert data[:5] == b"\x1bLua\x51"
        self.size_format = {4: "<I", 8: "<Q"}[data[8]]
        self.data = data
        self.at = 12
        self.functions: list[Function] = []
        self._function()

    def _take(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._take(self.size_format)
        self.at += length
        return self.data[self.at - length : self.at - 1].decode(errors="replace") if length else ""

    def _function(self) -> None:
        function = Function()
        self.functions.append(function)
        self._string()
        self.at += 4 + 4 + 4
        code = [self._take("<I") for _ in range(self._take("<i"))]
        for _ in range(self._take("<i")):
            kind = self._take("<B")
            readers = {0: lambda: None, 1: lambda: self._take("<B"), 3: lambda: self._take("<d"), 4: self._string}
            function.constants.append(readers[kind]())
        for _ in range(self._take("<i")):
            self._function()
        lines = self._take("<i")
        self.at += 4 * lines
        for _ in range(self._take("<i")):
            self._string()
            self.at += 8
        for _ in range(self._take("<i")):
            self._string()
        for instruction in code:
            operation, constant = instruction & 0x3F, instruction >> 14
            if operation == GETGLOBAL:
                function.reads.add(function.constants[constant])
            elif operation == SETGLOBAL:
                function.writes.add(function.constants[constant])


def compiled(text: str) -> Chunk:
    """Compile a script with Lua 5.1, the version that every server has."""
    dump = lua51.LuaRuntime(encoding=None).eval(
        b"function(text) local chunk, error = loadstring(text); return chunk and string.dump(chunk) or error end"
    )(text.encode())
    assert dump.startswith(b"\x1bLua"), dump.decode()
    return Chunk(dump)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_script_has_no_global_of_its_own(name: str) -> None:
    """Compiled, a script writes no global variable and reads only those that every server has."""
    functions = compiled(OPERATIONS[name].text).functions
    assert set().union(*(function.writes for function in functions)) == set()
    assert set().union(*(function.reads for function in functions)) <= KNOWN


def test_the_look_at_globals_finds_them() -> None:
    """The test above would notice a forgotten `local`."""
    functions = compiled("local a = 1\nlocal function f() b = a + c end\nf()").functions
    assert set().union(*(function.writes for function in functions)) == {"b"}
    assert set().union(*(function.reads for function in functions)) == {"c"}


def test_no_shebang_and_no_newer_library() -> None:
    """Nothing needs more than Redis 6.2 and fakeredis have."""
    for name, text in FILES.items():
        assert not text.startswith("#!"), name
        assert not re.search(
            r"\b(?:cmsgpack|bit|struct|redis\.(?:setresp|breakpoint|register_function))\b", strip_comments(text)
        ), name
        assert "\t" not in text, name


def test_time_is_read_once() -> None:
    """TIME is called in the prelude and nowhere else, save by the probe that asks for the right to."""
    for name, text in FILES.items():
        assert strip_comments(text).count("'TIME'") == (1 if name in {"prelude", "probe"} else 0), name


def test_digests_are_of_the_texts() -> None:
    """Two scripts are two texts, and what is called is what is loaded."""
    assert len({script.sha for script in OPERATIONS.values()}) == len(OPERATIONS)
    for script in OPERATIONS.values():
        assert re.fullmatch(r"[0-9a-f]{40}", script.sha)
        assert script.sha.encode() in script.head
        assert b"*%d\r\n" % (3 + 4 + len(script.args)) in script.head


# The adapter's


def test_every_file_of_the_adapter_is_an_operation() -> None:
    """Each file is a script of registry.py, under its own digest, beside those of the core, or a part of one."""
    parts = ADAPTER_FILES.keys() - ADAPTER_OPERATIONS.keys()
    assert ADAPTER_OPERATIONS.keys() <= ADAPTER_FILES.keys()
    for part in parts:
        assert any(ADAPTER_FILES[part] in script.text for script in ADAPTER_OPERATIONS.values()), part
    every = [*OPERATIONS.values(), *ADAPTER_OPERATIONS.values()]
    assert len({script.sha for script in every}) == len(every)


@pytest.mark.parametrize("name", sorted(ADAPTER_OPERATIONS))
def test_the_head_of_an_operation_of_the_adapter_is_complete(name: str) -> None:
    """Purpose, KEYS, ARGV, Reply and Cost are told; KEYS and ARGV as registry.py sends them."""
    assert re.match(rf"{name}: \w.{{10}}", head(name, ADAPTER_FILES))
    assert section(name, "KEYS", ADAPTER_FILES).split() == list(ADAPTER_KEYS)
    args = list(ADAPTER_OPERATIONS[name].args)
    assert section(name, "ARGV", ADAPTER_FILES).split("\n")[0].split() == args
    assert section(name, "Reply", ADAPTER_FILES).startswith("{tag")
    assert re.search(r"O\(.+\)", section(name, "Cost", ADAPTER_FILES))
    read = re.findall(r"ARGV\[(\d+)\]", strip_comments(ADAPTER_FILES[name]))
    assert set(map(int, read)) == set(range(1, len(args) + 1))


@pytest.mark.parametrize("name", sorted(ADAPTER_OPERATIONS))
def test_a_script_of_the_adapter_touches_its_keys_only(name: str) -> None:
    """It has no global variable, calls nothing newer than Redis 6.2, and no key but the three."""
    text = strip_comments(ADAPTER_FILES[name])
    for command, key in re.findall(r"redis\.p?call\('([A-Z]+)'(?:, *([^,()]+))?", text):
        if command not in WITHOUT_KEY:
            assert key.strip() in ADAPTER_KEYS or re.fullmatch(r"KEYS\[(?:[1-3]|i)\]", key.strip()), f"{command} {key}"
    naming = "local records, owners, relays = KEYS[1], KEYS[2], KEYS[3]"
    assert naming in text or not any(re.search(rf"\('[A-Z]+', {key}\b", text) for key in ADAPTER_KEYS)
    functions = compiled(ADAPTER_OPERATIONS[name].text).functions
    assert set().union(*(function.writes for function in functions)) == set()
    assert set().union(*(function.reads for function in functions)) <= KNOWN
    assert not text.startswith("#!")
    assert "\t" not in text


# The guard's, which is put behind scripts of users


GUARD = {"guard": resources.files("redlease.guards").joinpath("lua", "guard.lua").read_text()}


def test_the_head_of_the_guard_is_complete() -> None:
    """Purpose, KEYS, ARGV, Reply and Cost are told; what is the guard's comes last, so it is removed from the end."""
    tag, *args = guards.CHECK.args
    assert re.match(r"guard: \w.{10}", head("guard", GUARD))
    assert section("guard", "KEYS", GUARD).split() == ["guard"]
    assert section("guard", "ARGV", GUARD).split() == [*args, tag]
    assert section("guard", "Reply", GUARD).startswith("{tag")
    assert re.search(r"O\(.+\)", section("guard", "Cost", GUARD))
    assert re.findall(r"table.remove\((\w+)\)", GUARD["guard"]) == ["ARGV"] * len([tag, *args]) + ["KEYS"]


@pytest.mark.parametrize(
    "script", [guards.CHECK, guards.RunScript("return KEYS[1]", 1, 2)], ids=lambda script: script.name
)
def test_the_guard_touches_its_key_only(script: scripts.Script) -> None:
    """It has no global variable, calls nothing newer than Redis 6.2, and is the same behind every script."""
    text = strip_comments(GUARD["guard"])
    for command, key in re.findall(r"redis\.p?call\('([A-Z]+)'(?:, *([^,()]+))?", text):
        assert command in WITHOUT_KEY or key == "guard"
    functions = compiled(script.text).functions
    assert set().union(*(function.writes for function in functions)) == set()
    assert set().union(*(function.reads for function in functions)) <= KNOWN | {"pcall"}
    assert "\t" not in text
    assert script.text.endswith(guards.CHECK.text.removeprefix("local theirs\n"))


def test_a_run_is_counted_as_it_is_sent() -> None:
    """The head of a command names how many words follow, whatever the numbers of keys and arguments."""
    for keys, args in ((0, 0), (2, 3)):
        script = guards.RunScript("return 1", keys, args)
        words = 3 + keys + 1 + args + len(script.args)
        assert script.head.startswith(b"*%d\r\n$4\r\nEVAL\r\n" % words)
        assert script.head.endswith(b"\r\n$1\r\n%d\r\n" % (keys + 1))
