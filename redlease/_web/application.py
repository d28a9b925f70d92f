"""The application: the page and its files, the stream of events, and the changes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from redlease import Redlease, RedleaseError, Semaphore
from redlease._core import clock
from redlease._core.primitives.overview import UNDECLARED

from .access import AccessControl, may_change
from .gatherer import Gatherer, beat

BEAT_S = 5.0  # a browser that hears nothing for several of these says so
BROWSERS_MOST = 64  # that have a stream at the same time
BODY_BYTES_MAX = 10_000
T = TypeVar("T", str, int)
Change = Callable[[Semaphore, dict[str, Any]], Awaitable[dict[str, Any]]]

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class View:
    """What the page asks for.

    Args:
        client: The client of the Redis server.
        gatherer: Looks at the resources.
        facts: What the page says of itself: the server, the prefix, the pattern.
        token: What a change must carry; None if the view is read-only.
    """

    def __init__(self, client: Redlease, gatherer: Gatherer, facts: dict[str, Any], token: str | None) -> None:
        self._client = client
        self._gatherer = gatherer
        self._token = token
        self._facts: dict[str, Any] = facts | {"changes": token is not None}
        page = files("redlease._web").joinpath("page")
        self._files = {each.name: each.read_bytes() for each in page.iterdir() if each.is_file()}

    def application(self, hosts: Collection[str]) -> Starlette:
        """Returns the ASGI application."""
        routes = [
            Route("/", self.file),
            Route("/facts", self.facts),
            Route("/events", self.events),
            Route("/release", self.release, methods=["POST"]),
            Route("/resize", self.resize, methods=["POST"]),
            Route("/{name}", self.file),
        ]
        return Starlette(routes=routes, middleware=[Middleware(AccessControl, hosts=hosts)])

    async def file(self, request: Request) -> Response:
        """The page, or a file of it."""
        name = request.path_params.get("name", "index.html")
        content = self._files.get(name)
        if content is None:
            return Response("There is no such file.\n", 404, media_type="text/plain")
        return Response(content, media_type=TYPES[name.rpartition(".")[2]])

    async def facts(self, _: Request) -> Response:
        """What the page says of itself."""
        return JSONResponse(self._facts)

    async def events(self, request: Request) -> Response:
        """The stream: what is there, and from then on what changes. `?resource=NAME` adds the details of one."""
        if self._gatherer.viewers >= BROWSERS_MOST:
            return _refused(503, f"{BROWSERS_MOST} browsers look already. Close one, and load the page again")
        resource = request.query_params.get("resource")
        try:
            if resource is not None:
                self._client._operations.resource(resource)
        except ValueError as error:
            return _refused(400, str(error))
        return StreamingResponse(self._stream(resource), media_type="text/event-stream")

    async def _stream(self, resource: str | None) -> AsyncIterator[bytes]:
        with self._gatherer.viewer(resource) as viewer:
            while not self._gatherer.is_closed:
                yield b"".join(viewer.news()) or beat()
                await clock.pause(viewer.changed, BEAT_S)

    # Changes

    async def release(self, request: Request) -> Response:
        """Takes a ticket out, as holder or from the queue: `{"resource": …, "ticket": …}`."""

        async def change(resource: Semaphore, order: dict[str, Any]) -> dict[str, Any]:
            return {"released": await resource.release(_field(order, "ticket", str))}

        return await self._changed(request, change)

    async def resize(self, request: Request) -> Response:
        """Sets the capacity: `{"resource": …, "capacity": …}`."""

        async def change(resource: Semaphore, order: dict[str, Any]) -> dict[str, Any]:
            await resource.resize(capacity := _field(order, "capacity", int))
            return {"capacity": capacity}

        return await self._changed(request, change)

    async def _changed(self, request: Request, change: Change) -> Response:
        if self._token is None:
            return _refused(403, "the view is read-only. Start it with --allow-changes")
        if not may_change(request, self._token):
            return _refused(401, "the token is missing or wrong. `redlease web` has printed it")
        try:
            order = await _order_in(request)
        except (ValueError, RecursionError) as error:
            return _refused(400, f"the request must be a JSON object: {error}")
        try:
            resource = self._client.semaphore(_field(order, "resource", str), capacity=UNDECLARED)
            result = await change(resource, order)
        except ValueError as error:
            return _refused(422, str(error))
        except RedleaseError as error:
            return _refused(503, str(error))
        self._gatherer.look_closely_now()
        return JSONResponse(result)


async def _order_in(request: Request) -> dict[str, Any]:
    """Returns what the body asks for.

    Raises:
        ValueError: It is no JSON object, or is too long.
        RecursionError: It is too deep.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"it is longer than {BODY_BYTES_MAX} bytes")
    order = json.loads(body)
    if not isinstance(order, dict):
        raise ValueError(f"it is a {type(order).__name__}")
    return order


def _field(order: dict[str, Any], name: str, kind: type[T]) -> T:
    """Returns a field of an order; raises ValueError if it is missing or of another type. True is no number."""
    value = order.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name!r} must be a JSON {'string' if kind is str else 'integer'}")
    return value


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)
