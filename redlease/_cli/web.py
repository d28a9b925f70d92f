"""The command `redlease web`: says where the view is, and warns of what others can reach."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from .connecting import print_error, run
from .demo.run import without_secrets
from .plain import plain

if TYPE_CHECKING:
    from redlease._web.serving import Address

NEEDED = ("starlette", "uvicorn")


def serve_view(
    *,
    url: str,
    prefix: str,
    pattern: str,
    host: str,
    port: int,
    hosts: list[str],
    allow_changes: bool,
    as_json: bool,
) -> None:
    """Serves the view until it is interrupted; exits with 1 if it cannot."""
    try:
        from redlease._web.serving import Settings, serve  # noqa: PLC0415 - they come with an extra
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        print_error(f"this command needs {missing}. Install it with: pip install 'redlease[web]'")
        raise typer.Exit(1) from None

    def on_ready(address: Address) -> None:
        if not address.is_loopback:
            _warn(address)
        if as_json:
            typer.echo(json.dumps({"url": address.url, "token": address.token}))
        else:
            typer.echo(_text(address, settings.server, prefix))

    settings = Settings(url, prefix, pattern, without_secrets(url), host, port, hosts, allow_changes)
    run(serve(settings, on_ready))


def _text(address: Address, server: str, prefix: str) -> str:
    where = address.url if address.token is None else f"{address.url}#token={address.token}"
    mode = "Read-only."
    if address.changes:
        mode = "Anyone with this address, which contains the token, can change resources."
        if address.token is None:
            mode = "Anyone with the token of REDLEASE_WEB_TOKEN can change resources: the page asks for it."
    return plain(f"The resources of {server} under the prefix {prefix!r}: ") + f"{where}\n{mode} Ctrl-C ends it."


def _warn(address: Address) -> None:
    print_error(
        "WARNING: this is not a loopback address. Whoever reaches the port sees all names, owners and metadata."
    )
    if address.changes:
        print_error("WARNING: the token travels unencrypted. Whoever reads along can release and resize everything.")
    print_error("Use --host 127.0.0.1 with an SSH tunnel, or a proxy that adds TLS and a login.")
