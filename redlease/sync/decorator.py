"""A decorator that holds a lock or a semaphore while the decorated function runs in its thread."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from redlease._core.primitives.decorator import checked_key, parameter_for_hold, passed

from .hold import Hold, HoldRequest

P = ParamSpec("P")
R = TypeVar("R")


class Decorator:
    """Decorates functions that return when they are done. Made by `Semaphore.holding`.

    Args:
        request: Makes the hold of one call, for what is added to its name and for its fairness key.
        name_for: Returns what is added to the name, from the arguments; None if all calls share one resource.
        key: The fairness key of a call, or what returns it; None for none.
    """

    def __init__(
        self,
        request: Callable[[str | None, str | None], HoldRequest],
        name_for: Callable[..., str] | None,
        key: str | Callable[..., str] | None,
    ) -> None:
        self._request = request
        self._keys = name_for, key

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns the function that holds a permit while the given one runs."""
        parameter = parameter_for_hold(checked_function(function), Hold)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.request_for(function, *args, **kwargs) as hold:
                if parameter is not None and parameter not in passed(function, *args, **kwargs):
                    kwargs[parameter] = hold
                result = function(*args, **kwargs)
            return checked_result(function, result)

        return call

    def request_for(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> HoldRequest:
        """Returns the hold of one call; raises ValueError if a key of it is none."""
        keys = [key(*args, **kwargs) if callable(key) else key for key in self._keys]
        return self._request(*(key if key is None else checked_key(function, key) for key in keys))


def checked_function(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function; raises ValueError for one that would go on after its call, without the permit."""
    if not callable(function) or any(
        is_kind(function)
        for is_kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    ):
        raise ValueError(
            f"redlease.sync decorates functions that are done when they return, not {function!r}: "
            "`async def` functions take `holding` of redlease"
        )
    return function


def checked_result(function: Callable[..., R], result: R) -> R:
    """Returns what the function returned; raises ValueError if that is not the end of its work."""
    if inspect.isawaitable(result):
        raise ValueError(
            f"redlease.sync: {function!r} returned {result!r:.80}, which would run without the "
            "permit: `async def` functions take `holding` of redlease"
        )
    return result
