"""Error replies of the server, and how the client handles them."""

from __future__ import annotations

import re

from redlease.errors import NotReplicated, RedleaseError

RETRY_MS = 100.0  # the pause after an error reply
RELOAD_MS = 5.0  # the pause after NOSCRIPT: the scripts are being loaded

_CODES = re.compile(
    r"\b(OOM|WRONGTYPE|READONLY|NOPERM|NOREPLICAS|MISCONF|LOADING|BUSY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOSCRIPT|NOAUTH"
    r"|WRONGPASS|MOVED|ASK|CROSSSLOT|ACL failure|can't run this command|can't access at least one of the)\b"
)
_AGAIN = frozenset({"LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOSCRIPT"})
_ELSEWHERE = frozenset({"READONLY", "NOAUTH"})
_NOT_ALLOWED = frozenset({"NOPERM", "ACL failure", "can't run this command", "can't access at least one of the"})


class ErrorReply:
    """An error reply: its code, and how the client handles it."""

    def __init__(self, text: str) -> None:
        found = _CODES.search(text)
        self.text = text
        self.code = found[1] if found else text.split(" ", 1)[0]

    @property
    def is_transient(self) -> bool:
        """Whether the call was not executed and may succeed if it is repeated on the same connection."""
        return self.code in _AGAIN

    @property
    def forgot_scripts(self) -> bool:
        """Whether the scripts have to be loaded again."""
        return self.code == "NOSCRIPT"

    @property
    def partially_executed(self) -> bool:
        """Whether the script stopped half-way: it tried to create a key whose slot is moving to another node."""
        return "non local key" in self.text

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
        return self.code in _NOT_ALLOWED

    def error(self, resource: str | None = None, ticket: str | None = None) -> RedleaseError:
        """Returns the error to raise, which says what to do next."""
        where = f"resource {resource!r}: " if resource is not None else ""
        kind = NotReplicated if self.code == "NOREPLICAS" else RedleaseError
        return kind(f"{where}{self._advice()} (server: {self.text})", resource=resource, ticket=ticket)

    def _advice(self) -> str:
        if self.not_allowed:
            return "the Redis user lacks a right; nothing was changed. Grant it redlease's commands, keys and channels"
        return _ADVICE.get(self.code, "the server refused the call; nothing was changed")


_ADVICE = {
    "OOM": "the server is out of memory and takes no new request; nothing was changed, and renewals and releases "
    "go on. Free memory or raise `maxmemory`",
    "WRONGTYPE": "one of its keys holds something that redlease did not write; nothing was changed. "
    "Delete that key or choose another `prefix`",
    "NOREPLICAS": "the server has fewer replicas than `min-replicas-to-write` asks for; nothing was changed. "
    "Try again when the replicas are back",
    "MISCONF": "the server cannot save to disk and refuses writes; nothing was changed. Mend its persistence",
    "WRONGPASS": "the server refused the user name or password. Put the right ones into the URL",
    "NOAUTH": "the server wants a user name and password. Put them into the URL",
    "NEWERFORM": "a newer release of redlease has stored it; nothing was changed. Upgrade redlease here, or choose "
    "another `prefix`",
    "MOVED": "the server is part of a cluster. Connect to it as a cluster",
    "CROSSSLOT": "the server is part of a cluster. Connect to it as a cluster",
}
