"""The items and results of a sequence as values in its payloads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

from temporalio.api.common.v1 import Payload

BYTES_MAX = 1_000_000  # of all items and results in a sequence: one run must be able to pass them to the next

Value = dict[str, Any]  # one item or result as JSON: {"json": ...}, or {"payload": ...} if it is encoded otherwise


def value_of(payload: Payload) -> Value:
    """A payload as JSON, readable if it contains JSON."""
    if dict(payload.metadata) == {"encoding": b"json/plain"}:
        with contextlib.suppress(ValueError):  # a payload made by hand may claim to be JSON and be none
            return {"json": json.loads(payload.data)}
    return {"payload": payload.SerializeToString().hex()}


def payload_of(value: Value) -> Payload:
    """The payload of a value."""
    if "json" in value:
        return Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(value["json"]).encode())
    return Payload.FromString(bytes.fromhex(value["payload"]))


def size_of(values: Iterable[Value]) -> int:
    """The size of the values as JSON, in bytes."""
    return sum(len(json.dumps(value)) for value in values)


def checked_size(resource: str, values: list[Value]) -> None:
    """Raises ValueError for items that are too large for one sequence."""
    if (size := size_of(values)) > BYTES_MAX:
        raise ValueError(
            f"resource {resource!r}: the items have {size:,} bytes, {BYTES_MAX:,} are allowed in one sequence. Pass "
            "what they can be found by, or hand them over in parts"
        )
