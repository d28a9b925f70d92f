"""Checks a server on connect, and distinguishes refusals from errors that another attempt may fix."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import ConnectionPool, SSLConnection

from redlease._core.log import about
from redlease._core.protocol import encoding, rights
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import ServerInfo, info_value
from redlease._core.protocol.scripts import PROBE, Script
from redlease.errors import RedleaseError

from .dialects import refuses_resp3
from .driver import error_text

logger = logging.getLogger("redlease")

Exchange = Callable[[bytes], Awaitable[Any]]  # sends a command at once, and returns its reply

_CLOSED = re.compile(r"Connection closed by server|the server closed it|\[Errno \d+\] Connection reset by peer")
_NO_LOGIN = re.compile(r"Authentication required|HELLO must be called with the client already authenticated")
_NO_DATABASE = re.compile(r"(?:ERR )?(?:invalid )?DB index")
OTHER_NAME = {62, 63, 64}  # OpenSSL's codes for a host name, e-mail or address that does not match the certificate


def explain(error: Exception, pool: ConnectionPool | None = None) -> str:
    """Returns the error in a few words, without a full stop, with a hint if the URL of the pool may be wrong."""
    text = error_text(error).rstrip(". ") if str(error) else type(error).__name__
    if pool is None:
        return text
    kind, caused_by = pool.connection_class, error.__cause__ or error.__context__ or error
    broken_off = isinstance(caused_by, ssl.SSLError | TimeoutError | ConnectionResetError | asyncio.IncompleteReadError)
    if isinstance(kind, type) and issubclass(kind, SSLConnection):
        hint = "; if the server does not use TLS on this port, begin the URL with `redis://`" if broken_off else ""
    else:
        closed = isinstance(caused_by, ConnectionResetError) or _CLOSED.match(text)
        hint = "; should the server have TLS on this port, the URL begins with `rediss://`" if closed else ""
    return text + hint


def refusal_of(error: Exception, prefix: str, *, cluster: bool = False) -> RedleaseError | None:
    """Returns the error for callers if the server was reached and refused; None if it could not be reached."""
    if isinstance(error, RedleaseError):
        return error
    text = explain(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        none_given = _NO_LOGIN.match(text)
        what = "wants a user name and password" if none_given else "refused the user name or password"
        return RedleaseError(
            f"the server {what}: {text}. Put {'them' if none_given else 'the right ones'} into the URL"
        )
    wrong = error.__cause__ or error.__context__
    if isinstance(wrong, ssl.SSLCertVerificationError):
        return RedleaseError(_untrusted(wrong, text))
    if isinstance(error, exceptions.ResponseError):
        return _refused_reply(ErrorReply(error_text(error)), prefix, cluster)
    if isinstance(error, exceptions.RedisError | OSError | TimeoutError):
        return None
    return RedleaseError(f"no connection can be made with these settings: {error!r}")


def is_mistake(error: Exception) -> bool:
    """Returns True for an error that server, network or settings cannot cause, so a bug."""
    return not isinstance(error, RedleaseError | exceptions.RedisError | OSError | TimeoutError)


def missing_rights(errors: list[str], prefix: str, *, cluster: bool = False) -> RedleaseError:
    """Returns the error for a Redis user who lacks the permissions that these replies name."""
    rules = rights.rules(prefix, rights.CLIENT + rights.WORKER) + f" {rights.CLUSTER_RULES}" * cluster
    return RedleaseError(
        f"the Redis user lacks rights that redlease needs: {'; '.join(error.rstrip('. ') for error in errors)}. "
        f"Grant them, for example: ACL SETUSER <user> {rules}"
    )


INFO_PARTS = ("server", "replication")  # what tells as much as HELLO, where a server lacks that


def read_info(replies: Sequence[Any]) -> dict[str, str] | None:
    """Returns what HELLO would tell, from the replies to INFO; None if they tell nothing."""
    text = "\n".join(reply.decode(errors="replace") for reply in replies if isinstance(reply, bytes))
    version = info_value(text, "redis_version")
    if not version:
        return None
    found = {"server": "redis", "version": version, "mode": info_value(text, "redis_mode")}
    return found | {"role": info_value(text, "role") or "master"}


def read_hello(hello: Any) -> ServerInfo | None:
    """Parses the reply to HELLO; None if this user may not call HELLO a second time.

    Raises:
        RedleaseError: The server cannot be used.
    """
    if isinstance(hello, list):
        hello = dict(zip(hello[::2], hello[1::2], strict=True))
    if not isinstance(hello, dict):
        return None
    text = {_text(key): _text(value) for key, value in hello.items()}
    server = ServerInfo(text.get("version", ""), text.get("role", "master"))
    if "sentinel" in (server.role, text.get("mode")):
        raise RedleaseError("the server is a Sentinel. Give it as redis+sentinel://host:port/<name of the service>")
    if text.get("server") in ("redis", "valkey") and server.too_old:
        raise RedleaseError(f"the server is version {server.version}; redlease needs Redis 6.2 or newer, or Valkey")
    return server


def read_server(hello: Any, *, was_primary: bool) -> ServerInfo | None:
    """Does what `read_hello` does, and checks that the server is a primary.

    Raises:
        ConnectionError: The server, a primary before, is a replica now.
        RedleaseError: The server cannot be used.
    """
    server = read_hello(hello)
    if server is not None and server.role in ("slave", "replica"):
        if was_primary:
            raise exceptions.ConnectionError("the server is a replica now, and no primary is known yet")
        raise RedleaseError("the server is a read-only replica. Connect to its primary, or through Sentinel")
    return server


def settle_exchange(future: asyncio.Future[Any], reply: Any, trouble: str) -> None:
    """Sets the result of a command; ConnectionError if there is none and another attempt to connect may get one."""
    if future.done():
        return
    if reply is None or (isinstance(reply, ErrorReply) and reply.is_transient):
        future.set_exception(exceptions.ConnectionError(trouble if reply is None else reply.text))
        future.exception()  # marks it as retrieved: of several such futures only the first is awaited
    else:
        future.set_result(reply)


def needs_texts(loaded: Sequence[Any]) -> bool:
    """Returns True if the server loads no scripts, by its replies to SCRIPT LOAD.

    Raises:
        ResponseError: It refused them for another reason.
    """
    errors = [reply for reply in loaded if isinstance(reply, ErrorReply)]
    for error in errors:
        if error.not_allowed or refuses_resp3(error.text):
            raise exceptions.ResponseError(error.text)
    return bool(errors)


async def run_once(exchange: Exchange, script: Script, resource: Resource, *args: str, sends_text: bool) -> Any:
    """Calls a script that each connection calls once, and returns its reply, or the error reply.

    Raises:
        ConnectionError: The reply is that to another call, as after a proxy that repeats or drops one.
    """
    call = ("4", *resource.keys, script.name, *args)
    if sends_text:
        reply = await exchange(encoding.plain("EVAL", script.text, *call))
    else:
        loaded = exchange(encoding.plain("SCRIPT", "LOAD", script.text))
        reply = await exchange(encoding.plain("EVALSHA", script.sha, *call))
        await loaded
    if not isinstance(reply, ErrorReply) and (not isinstance(reply, list) or reply[:1] != [script.name.encode()]):
        raise exceptions.ConnectionError("the server sent a reply that answers another call")
    return reply


async def probe(
    run: Callable[[Script, Resource], Awaitable[Any]], resource: Resource, prefix: str, *, cluster: bool
) -> bool:
    """Finds missing permissions on connect, so that no operation fails half-way later.

    A user who may read everything and write nothing is let in: each of its writes is refused whole. Returns whether it
    may write.
    """
    reply = await run(PROBE, resource)
    errors = [b"evalsha: " + reply.text.encode()] if isinstance(reply, ErrorReply) else reply[1:]
    missing: dict[str, str] = {}
    for command, _, text in (error.decode().partition(": ") for error in errors):
        fault = ErrorReply(text)
        if fault.lacks_command or (command == "evalsha" and fault.code == "ERR" and not fault.not_allowed):
            raise fault.error()  # no script runs there; a redirection of a cluster has a code of its own
        if fault.not_allowed:
            missing[command] = f"{command}: {text}"
    if missing and missing.keys() != rights.WRITES_PROBED:
        raise missing_rights(list(missing.values()), prefix, cluster=cluster)
    return not missing


async def check_eviction(exchange: Exchange) -> None:
    """Warns if the server may evict keys when it is short of memory."""
    info = await exchange(encoding.plain("INFO", "memory"))
    policy = info_value(info.decode() if isinstance(info, bytes) else str(info), "maxmemory_policy")
    if policy not in ("", "noeviction"):
        logger.warning(
            "the server's maxmemory-policy is %r: it may drop the keys of locks when memory runs short. "
            "Use a server with 'noeviction' for locks",
            policy,
            extra=about(),
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _untrusted(wrong: ssl.SSLCertVerificationError, text: str) -> str:
    if wrong.verify_code in OTHER_NAME:
        return f"the server's certificate is for another name: {text}. Put the name that it has into the URL"
    return f"the server's certificate is not trusted: {text}. Give its authority as `ssl_ca_certs`"


def _refused_reply(fault: ErrorReply, prefix: str, cluster: bool) -> RedleaseError | None:
    if refuses_resp3(fault.text):
        return RedleaseError(f"the server does not work with RESP3: {fault.text}. Leave `protocol` out, or give 2")
    if _NO_DATABASE.match(fault.text):
        return RedleaseError(f"the server has no such database: {fault.text}. Put another number at the end of the URL")
    if fault.not_allowed:
        return missing_rights([fault.text], prefix, cluster=cluster)
    return None if fault.is_transient else fault.error()
