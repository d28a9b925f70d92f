"""A decorator that holds a lock or a semaphore while the decorated function runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, get_args

from redlease.hold import Hold, HoldRequest

P = ParamSpec("P")
R = TypeVar("R")


class Decorator:
    """Decorates async functions. Made by `Semaphore.guarded`.

    Args:
        request: Makes the hold of one call, for the key of that call.
        key: Returns the key of a call from its arguments; None if all calls share one resource.
    """

    def __init__(self, request: Callable[[str | None], HoldRequest], key: Callable[..., str] | None) -> None:
        self._request = request
        self._key = key

    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Returns the function that holds a permit while the given one runs."""
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"guarded() decorates `async def` functions, not {function!r}")
        parameter = _parameter_for_hold(function)

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            key = None if self._key is None else _checked_key(function, self._key(*args, **kwargs))
            async with self._request(key) as hold:
                if parameter is not None and parameter not in _passed(function, *args, **kwargs):
                    kwargs[parameter] = hold
                return await function(*args, **kwargs)

        return call


def _checked_key(function: Callable[..., Any], key: object) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(
            f"the key of a call of {function.__qualname__} must be a string that is not empty, not {key!r}"
        )
    return key


def _passed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    return inspect.signature(function).bind_partial(*args, **kwargs).arguments


def _parameter_for_hold(function: Callable[..., Any]) -> str | None:
    """Returns the name of the first parameter that is annotated as a `Hold`, also `Hold | None`."""
    for parameter in inspect.signature(function).parameters.values():
        if _is_hold(parameter.annotation):
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(f"{function.__qualname__} must take its hold {parameter.name!r} by name")
            return parameter.name
    return None


def _is_hold(annotation: object) -> bool:
    # A string where annotations are not evaluated: names that are imported for type checkers only have no value.
    if isinstance(annotation, str):
        return any(part.strip(" \"'").rpartition(".")[2] == "Hold" for part in annotation.split("|"))
    return annotation is Hold or Hold in get_args(annotation)
