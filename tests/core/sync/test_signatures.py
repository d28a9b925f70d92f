"""The two faces cannot drift apart: each public method of one is in the other, with the same parameters and types."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest

import redlease
import redlease.sync
from redlease.sync.thread.block import Exit, Manager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLASSES = [
    name
    for name in redlease.__all__
    if isinstance(getattr(redlease, name), type) and getattr(redlease, name) is not getattr(redlease.sync, name)
]
# What a thread spells in another way, and what one face alone has.
SPELLED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__await__": "acquire"}
# A thread cannot put a time limit around a wait, as a task does with `asyncio.timeout`.
WITH_TIMEOUT = {("Hold", "wait_lost"), ("Term", "wait_lost")}
# What a task awaits or enters, and a thread has at once: a hold can be entered too.
AT_ONCE = {("Lock", "adopt"), ("Semaphore", "adopt")}
TYPES = [
    (r"AsyncGenerator\[Snapshot, None\]", "Watch"),
    (r"AsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]"),
    (r"(?:Awaitable|Coroutine\[Any, Any,) ?\[?(.*?)\]", r"\1"),
    (r"^Generator\[object, None, (.*)\]$", r"\1"),
    (r"^Redis \| RedisCluster$", "redis.Redis | redis.RedisCluster | redis.asyncio.Redis | redis.asyncio.RedisCluster"),
    (r"Callable\[\[Item, Hold\], Any\]", "Callable[[Item, Hold], Any]"),
    (r"^(ReadSide|WriteSide)$", "Semaphore"),
]


def public(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class, and those that syntax calls, by name."""
    names = [name for name in dir(kind) if not name.startswith("_") or name in SPELLED or name in SPELLED.values()]
    found = {name: inspect.getattr_static(kind, name) for name in names}
    found |= {name: Manager._leave_kept for name, each in found.items() if isinstance(each, Exit)}
    wanted = (staticmethod, classmethod, property)
    return {name: each for name, each in found.items() if inspect.isfunction(each) or isinstance(each, wanted)}


def spelled(kind: str, name: str) -> str:
    """Return the name that a method has in the blocking face."""
    return "results" if (kind, name) == ("SequenceRun", "__await__") else SPELLED.get(name, name)


def plain(annotation: object) -> str:
    """Return an annotation of the asyncio face as that of the blocking one has it."""
    text = str(annotation)
    for pattern, replacement in TYPES:
        text = re.sub(pattern, replacement, text)
    return text


def parameters(method: Any, shown: Callable[[object], str]) -> list[tuple[str, Any, str, str]]:
    """Return name, kind, annotation and default of each parameter, and after them what is returned."""
    function: Any = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
    signature = inspect.signature(function)
    found = [
        (each.name, each.kind, shown(each.annotation), "" if each.annotation == "OnLost" else repr(each.default))
        for each in signature.parameters.values()
    ]
    return [*found, ("returns", None, shown(signature.return_annotation), "")]


def pairs() -> Iterator[tuple[str, str]]:
    """Yield the class and the name of each method of the asyncio face."""
    for kind in CLASSES:
        yield from ((kind, name) for name in public(getattr(redlease, kind)))


@pytest.mark.parametrize(("kind", "name"), [*pairs()])
def test_a_method_is_the_same_on_both_faces(kind: str, name: str) -> None:
    """It has the same parameters, defaults and types, save that nothing is awaited."""
    theirs, ours = public(getattr(redlease, kind))[name], public(getattr(redlease.sync, kind))[spelled(kind, name)]
    assert type(theirs) is type(ours)
    wanted, found = parameters(theirs, plain), parameters(ours, str)
    if (kind, name) in WITH_TIMEOUT:
        wanted.insert(1, ("timeout", inspect.Parameter.POSITIONAL_OR_KEYWORD, "Duration | None", "None"))
    if (kind, name) in AT_ONCE:
        wanted[-1] = ("returns", None, "Hold", "")
    assert found == wanted


def test_no_face_has_what_the_other_has_not() -> None:
    """Both have the same names, and each class the same methods."""
    assert sorted(redlease.sync.__all__) == sorted(redlease.__all__)
    for kind in CLASSES:
        theirs = {spelled(kind, name) for name in public(getattr(redlease, kind))}
        assert set(public(getattr(redlease.sync, kind))) == theirs, kind


def test_a_parameter_that_one_face_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is one that can fail."""
    monkeypatch.setattr(redlease.Semaphore, "renew", redlease.Semaphore.release)
    with pytest.raises(AssertionError):
        test_a_method_is_the_same_on_both_faces("Semaphore", "renew")
    monkeypatch.setattr(redlease.Lock, "novelty", redlease.Lock.release, raising=False)
    with pytest.raises(AssertionError):
        test_no_face_has_what_the_other_has_not()
