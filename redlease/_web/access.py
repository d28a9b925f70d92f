"""Who may talk to the web view: the Host of a request, where in a browser it comes from, and the token for changes."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The page needs nothing but its own files. Trusted Types let no script set HTML from text, even by mistake.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
HOST = re.compile(r"(\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(:[0-9]*)?")
TOKEN_HEADER = "X-Redlease-Token"  # noqa: S105 - the name of the header, not a token
TOKEN_LENGTH_MIN = 16


class AccessControl:
    """Middleware that refuses requests from elsewhere and adds the security headers to every response.

    Args:
        app: The application.
        hosts: Names by which browsers may address the view, besides `localhost` and IP addresses.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Headers(scope=scope), scope["path"])
        app = self._app if refusal is None else PlainTextResponse(refusal, 403)
        await app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, path: str) -> str | None:
        """Returns why the request is refused, or None.

        A page of another site may have the browser resolve a name of its own to this address (DNS rebinding) and would
        then count as the same origin. The browser still sends that name as Host.
        """
        host = headers.get("host", "")
        if not self._is_own(host):
            return f"The view is not served as {host!r}. If that is its name, start it with `--allow-host`.\n"
        # A link from another site may lead to the page itself, but no other site may load what the page loads.
        if path != "/" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "Only the page itself may load this.\n"
        return None

    def _is_own(self, host: str) -> bool:
        found = HOST.fullmatch(host)
        if found is None:
            return False
        if found["v6"] is not None:
            return _is_address(found["v6"])
        name = found["name"].lower().rstrip(".")
        return name in self._hosts or _is_address(name)


def _is_address(name: str) -> bool:
    """Returns True for an IP address, which is what it is: no DNS server decides where it leads."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def may_change(request: Request, token: str) -> bool:
    """Returns True if the request carries the token.

    It is in a header of its own: another site's page cannot send that without asking first, and nobody answers it.
    """
    given = request.headers.get(TOKEN_HEADER, "")
    return hmac.compare_digest(given.encode(), token.encode())
