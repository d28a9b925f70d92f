"""Error replies of the server, and how the client handles them."""

from __future__ import annotations

import re

from redlease.errors import NotReplicated, RedleaseError

RETRY_MS = 100.0  # the pause after an error reply
RELOAD_MS = 5.0  # the pause after NOSCRIPT: the scripts are being loaded

# Redis 6.2 wraps what a script raised, and has the code of a failed command behind a dash; so has what `pcall` returns.
# Later servers begin with the code, and name the script at the end. The rest of a text may be anybody's words: of an
# unknown command the server repeats the arguments, such as names or the text of a script.
_WRAPPING = re.compile(
    r"\A(?:(?:ERR )?Error running script \(call to \w+\): @user_script:\d+: )?(?:@user_script: \d+: )?-?"
)
_CODE = re.compile(r"[A-Z]+(?= |$)")
_FORBIDDEN = re.compile(r"(?:ERR )?(?:ACL failure in script: |The user executing the script can't )")
_NON_LOCAL = re.compile(r"(?:ERR )?(?:lua script |script )?attempted to access a non local key ", re.IGNORECASE)
_UNKNOWN = re.compile(r"(?:ERR )?unknown (?:redis )?command ", re.IGNORECASE)
_SCRIPT_FAILED = re.compile(r"(?:ERR )?user_script:\d+: ")

_AGAIN = frozenset({"LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOSCRIPT"})
_ELSEWHERE = frozenset({"READONLY", "NOAUTH"})


class ErrorReply:
    """An error reply: its code, and how the client handles it.

    Attributes:
        text: As the server sent it.
        code: The word in capitals that it begins with; "ERR" if there is none.
    """

    def __init__(self, text: str) -> None:
        self._words = _WRAPPING.sub("", text, count=1)
        found = _CODE.match(self._words)
        self.text = text
        self.code = found[0] if found else "ERR"

    @property
    def is_transient(self) -> bool:
        """Whether the call may succeed if it is repeated on the same connection; most such calls were not executed."""
        return self.code in _AGAIN or self.partially_executed

    @property
    def forgot_scripts(self) -> bool:
        """Whether the scripts have to be loaded again."""
        return self.code == "NOSCRIPT"

    @property
    def partially_executed(self) -> bool:
        """Whether the script stopped half-way: it tried to create a key whose slot is moving to another node."""
        return _NON_LOCAL.match(self._words) is not None

    @property
    def is_handled(self) -> bool:
        """Whether the client already fixes the cause, so that the error is not logged."""
        return self.forgot_scripts

    @property
    def retry_ms(self) -> float:
        """How long, in ms, to wait before the call is repeated."""
        return RELOAD_MS if self.is_handled else RETRY_MS

    @property
    def needs_new_connection(self) -> bool:
        """Whether the client must reconnect, which checks the role of the server again."""
        return self.code in _ELSEWHERE

    @property
    def not_allowed(self) -> bool:
        """Whether the Redis user lacks a permission."""
        return self.code == "NOPERM" or _FORBIDDEN.match(self._words) is not None

    @property
    def lacks_command(self) -> bool:
        """Whether the server does not have a command, such as one that was renamed."""
        return _UNKNOWN.match(self._words) is not None

    def error(self, resource: str | None = None, ticket: str | None = None) -> RedleaseError:
        """Returns the error to raise, which says what to do next."""
        where = f"resource {resource!r}: " if resource is not None else ""
        kind = NotReplicated if self.code == "NOREPLICAS" else RedleaseError
        return kind(f"{where}{self._advice()} (server: {self.text})", resource=resource, ticket=ticket)

    def _advice(self) -> str:
        if self.not_allowed:
            return "the Redis user lacks a right; nothing was changed. Grant it redlease's commands, keys and channels"
        if self.lacks_command:
            return "the server has disabled or renamed a command that redlease needs; nothing was changed. Enable it"
        if _SCRIPT_FAILED.match(self._words):
            return "a script failed, since a part of the state was deleted or overwritten. `redlease doctor` says more"
        return _ADVICE.get(self.code, "the server refused the call; nothing was changed")


_ADVICE = {
    "OOM": "the server is out of memory and takes no new request; nothing was changed, and renewals and releases "
    "go on. Free memory or raise `maxmemory`",
    "WRONGTYPE": "one of its keys holds something that redlease did not write; nothing was changed. "
    "Delete that key or choose another `prefix`",
    "NOREPLICAS": "the server has fewer replicas than `min-replicas-to-write` asks for; nothing was changed. "
    "Try again when the replicas are back",
    "MISCONF": "the server cannot save to disk and refuses writes; nothing was changed. Fix its persistence",
    "WRONGPASS": "the server refused the user name or password. Put the right ones into the URL",
    "NOAUTH": "the server wants a user name and password. Put them into the URL",
    "NEWERFORM": "a newer release of redlease has stored it; nothing was changed. Upgrade redlease here, or choose "
    "another `prefix`",
    "MOVED": "the server is part of a cluster. Use a URL that begins with `redis+cluster://`",
    "CROSSSLOT": "the server is part of a cluster. Use a URL that begins with `redis+cluster://`",
}
