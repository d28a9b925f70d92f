"""How large the state of a coordinator is as JSON: a run can pass at most 2 MB to the next one."""

from __future__ import annotations

import json
from collections.abc import Iterable

from .entries import Holder, QueuedTicket

ENTRY_BYTES = 600  # size of an entry as JSON, without its users' texts


def state_size(holders: Iterable[Holder], queue: Iterable[QueuedTicket]) -> int:
    """The approximate size of the entries in bytes."""
    size = 0
    for holder in holders:
        permit = holder.permit
        for each in (holder.requester, *holder.sharers):
            size += entry_size(each.workflow_id, permit.ticket, permit.owner, permit.metadata, permit.key or "")
    for queued in queue:
        spec = queued.request.spec
        for each in queued.requesters:
            size += entry_size(each.workflow_id, spec.ticket, spec.owner, spec.metadata, spec.key)
    return size


def entry_size(workflow_id: str, ticket: str, owner: str, metadata: dict[str, str], key: str) -> int:
    """The approximate size of an entry in bytes."""
    # A queued ticket contains the id twice.
    texts = [workflow_id, workflow_id, ticket, owner, *metadata, *metadata.values(), key]
    return ENTRY_BYTES + sum(map(_json_size, texts))


def _json_size(text: str) -> int:
    """The size of a text as JSON, which escapes all but ASCII."""
    plain = text.isascii() and text.isprintable() and not {'"', "\\"} & set(text)
    return len(text) if plain else len(json.dumps(text))
