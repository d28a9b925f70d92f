"""A decorator that holds a lock or a semaphore while the decorated function runs."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, get_args

from redlease._core.hold import Hold, HoldRequest
from redlease._core.options import AcquireSpec, HoldOptions

P = ParamSpec("P")
R = TypeVar("R")


class Decorator:
    """Decorates async functions. Made by `Semaphore.holding`.

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

    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Returns the function that holds a permit while the given one runs."""
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"holding() decorates `async def` functions, not {function!r}")
        parameter = parameter_for_hold(function, Hold)

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self.request_for(function, *args, **kwargs) as hold:
                if parameter is not None and parameter not in passed(function, *args, **kwargs):
                    kwargs[parameter] = hold
                return await function(*args, **kwargs)

        return call

    def request_for(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> HoldRequest:
        """Returns the hold of one call; raises ValueError if a key of it is none."""
        keys = [key(*args, **kwargs) if callable(key) else key for key in self._keys]
        return self._request(*(key if key is None else checked_key(function, key) for key in keys))


def requests_of(
    pool: Any, spec: Callable[[str | None], AcquireSpec], hold_options: HoldOptions
) -> Callable[[str | None, str | None], HoldRequest]:
    """Returns what makes the hold of one call of a function that `pool.holding` decorates; `pool`: a semaphore."""

    def request(suffix: str | None, key: str | None) -> HoldRequest:
        named = pool if suffix is None else pool._named(f"{pool.name}:{suffix}")
        return HoldRequest(named.name, named._obtain, spec(key), hold_options)

    return request


def checked_key(function: Callable[..., Any], key: object) -> str:
    """Returns the key of a call; raises ValueError if it is none."""
    if not isinstance(key, str) or not key:
        raise ValueError(
            f"the key of a call of {function.__qualname__} must be a string that is not empty, not {key!r}"
        )
    return key


def passed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call by the names of their parameters."""
    return inspect.signature(function).bind_partial(*args, **kwargs).arguments


def parameter_for_hold(function: Callable[..., Any], kind: type) -> str | None:
    """Returns the name of the first parameter that is annotated as a `Hold` of that class, also `Hold | None`."""
    for parameter in inspect.signature(function).parameters.values():
        if _is_hold(parameter.annotation, kind):
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(f"{function.__qualname__} must take its hold {parameter.name!r} by name")
            return parameter.name
    return None


def _is_hold(annotation: object, kind: type) -> bool:
    # A string where annotations are not evaluated: names that are imported for type checkers only have no value.
    if isinstance(annotation, str):
        return re.search(r"\bHold\b", annotation) is not None
    return annotation is kind or kind in get_args(annotation)
