"""The operations: each is one Lua script, called by EVALSHA with the four keys of one resource.

The first argument of each is a tag that the reply repeats, so that the client detects a reply to another call.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources

TAGS = 1 << 16  # how many calls may be outstanding on one connection before a tag repeats

# Without them the client would lose what it has, or keep what it no longer wants.
KEEPING = frozenset(("beat", "reduce", "release", "renew"))
# What the calls take that can be long, in usual calls.
UNITS = {"history": 100, "inspect": 100, "position": 100, "supersede": 30, "totals": 10}


class Script:
    """One operation: its text, its digest, and how many keys and arguments it takes.

    `deliver_after_pushes`: its reply is delivered after the messages that were read with it, so that the tasks of new
    holders start before the task that released. `goes_first`: it keeps alive or gives back what the client has, so no
    call of another kind is sent before it. `units`: what it costs the server at most, in usual calls.
    """

    def __init__(self, name: str, args: str, text: str, keys: int = 4, *, deliver_after_pushes: bool = False) -> None:
        self.name = name
        self.deliver_after_pushes = deliver_after_pushes
        self.goes_first = name in KEEPING
        self.units = UNITS.get(name, 1)
        self.args = ("tag", *args.split())
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        count = 3 + keys + len(self.args)
        self.head = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n%d\r\n" % (count, self.sha.encode(), keys)
        size = len(text.encode())
        # The same call with the text, for servers that load no scripts.
        self.text_head = b"*%d\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$1\r\n%d\r\n" % (count, size, text.encode(), keys)


# What a line `--#include` stands for.
LOOKS = frozenset(("check", "history", "inspect", "position", "totals"))  # write nothing; in a folder of their own
PARTS = {
    "acquire_usual": ("acquire_usual",),
    "release_usual": ("release_usual",),
    "renew_usual": ("renew_usual",),
    "state": ("state",),
    "form": ("form",),
    "repair": ("repair",),
    "grants": ("grants",),
    "queue": ("grants", "queue", "turns"),
    "share": ("share",),
    "limits": ("limits",),
    "behind": ("behind",),
    "room": ("room",),
}


@cache
def read_lua(package: str, name: str) -> str:
    """Reads a file from the `lua` directory of a package."""
    return resources.files(package).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def operation(
    name: str, args: str, *, package: str = "redlease._core", keys: int = 4, deliver_after_pushes: bool = False
) -> Script:
    """Makes an operation from a file in the `lua` directory of a package; `keys`: with those of the resource."""
    text = part("prelude") + sent(read_lua(package, f"looks/{name}" if name in LOOKS else name))
    included: list[str] = []
    for include, files in PARTS.items():
        if (line := f"--#include {include}\n") in text:
            new = [file for file in files if file not in included]
            text = text.replace(line, "".join(map(part, new)))
            included += new
    return Script(name, args, text, keys, deliver_after_pushes=deliver_after_pushes)


def part(name: str) -> str:
    """Returns a part as it is sent."""
    return sent(read_lua("redlease._core", f"parts/{name}"))


def sent(lua: str) -> str:
    """Returns the Lua of a file as it is sent, but for the parts that it includes."""
    return with_positions(stripped(lua), *(read_lua("redlease._core", name) for name in ("parts/state", "header")))


@cache
def stripped(lua: str) -> str:
    """Returns Lua without comment lines and indentation.

    The server keeps every text, and reads as much of a connection at a time as it once needed for one.
    """
    lines = (line.strip() for line in lua.splitlines())
    return "".join(f"{line}\n" for line in lines if line and (not line.startswith("--") or line.startswith("--#")))


@cache
def with_positions(lua: str, state: str, header: str) -> str:
    """Returns Lua with fields of the header, and their positions in the reply, in place of their names.

    So the names cost the server nothing. A file that does not read the header itself has it from parts/state.lua.

    Raises:
        KeyError: header.lua has no such name.
        ValueError: `read_header` does not read that field.
    """
    fields = dict(re.findall(r"^  (\w+) = (.+?),", header, re.MULTILINE))
    read, names = re.findall(r"(read_header\(([^)]+)\))", lua + state)[0]
    layout = re.findall(r"\w+", names)

    def position(found: re.Match[str]) -> str:
        return found[0] if fields[found[1]] == "NOTE" else f"was[{layout.index(found[1]) + 1}]"

    lua = lua.replace(read, f"call('HMGET', state, {', '.join(fields[name] for name in layout)})")
    return re.sub(r"was\.(\w+)", position, lua.replace("HEADER_SIZE", str(len(layout))))


ACQUIRE = operation(
    "acquire",
    "ticket request place arrival weight lease_ms capacity waiter_lease_ms max_waiters idle_ttl_ms label",
)
ACQUIRE_FOR_KEY = Script(ACQUIRE.name, " ".join((*ACQUIRE.args[1:], "key")), ACQUIRE.text)
RELEASE = operation("release", "ticket request fence tombstone_ms notify idle_ttl_ms", deliver_after_pushes=True)
RENEW = operation("renew", "ticket fence lease_ms shorten idle_ttl_ms")
ADOPT = operation("adopt", "ticket fence request place lease_ms refence idle_ttl_ms label")
SUPERSEDE = operation("supersede", "ticket request holders tombstone_ms grace_ms idle_ttl_ms after")
BEAT = operation("beat", "place waiter_lease_ms ticket idle_ttl_ms")
REDUCE = operation("reduce", "ticket fence weight idle_ttl_ms")
RESIZE = operation("resize", "capacity idle_ttl_ms")
LIMIT = operation("limit", "kind key units until idle_ttl_ms label")
INSPECT = operation("inspect", "most_holders most_waiters bytes after_deadline after_ticket after_entry most_counted")
TOTALS = operation("totals", "most")
HISTORY = operation("history", "before most")
POSITION = operation("position", "ticket")
CHECK = operation("check", "ticket fence")
WATCH = operation("watch", "watch_ms")
PROBE = Script("probe", "", stripped(read_lua("redlease._core", "probe")))
DELIVER = Script("deliver", "channel", stripped(read_lua("redlease._core", "deliver")))
SCRIPTS = (
    ACQUIRE,
    RELEASE,
    RENEW,
    ADOPT,
    SUPERSEDE,
    BEAT,
    REDUCE,
    RESIZE,
    LIMIT,
    INSPECT,
    TOTALS,
    HISTORY,
    POSITION,
    CHECK,
    WATCH,
)
