"""Reads the history of a resource."""

from __future__ import annotations

import json
from typing import Any, cast

from redlease.models import Event, HistoryEntry

HISTORY_COUNT = 100  # how many entries are read by default
PAGE_ENTRIES = 100  # of at most 2 kB: more would keep the server from others for too long

_decode = json.JSONDecoder().raw_decode


def read_entries(found: list[Any]) -> tuple[list[HistoryEntry], list[str]]:
    """Parses entries; returns those of redlease, and the ids of those that something else has added."""
    entries, foreign = [], []
    for each in found:
        try:
            entries.append(read_entry(each))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            foreign.append(each[0].decode())
    return entries, foreign


def read_entry(entry: list[Any]) -> HistoryEntry:
    """Parses an entry as `note` in state.lua wrote it; raises an error if something else did."""
    id_, words = entry[0].decode(), [word.decode(errors="replace") for word in entry[1]]
    fields = dict(zip(words[::2], words[1::2], strict=True))
    event, weight, span_ms = cast("Event", fields["e"]), int(fields["w"]), int(fields["m"])
    resized, waited = (
        event in {"resized", "limited", "lifted"},
        event == "granted" or (event in {"forced", "superseded"} and fields["f"] == "0"),
    )
    owner = _decode(fields["o"])[0] if fields["o"] else ""
    key = _decode(fields["k"])[0] if "k" in fields else None
    if not isinstance(owner, str) or not isinstance(key, str | None):
        raise TypeError(f"{owner!r} or {key!r} is no name")
    if event in {"limited", "lifted"}:
        key = fields["t"] or None
    return HistoryEntry(
        id_,
        int(id_.partition("-")[0]),
        event,
        fields["t"],
        owner,
        int(fields["f"]),
        0 if resized else weight,
        waited_ms=span_ms if waited else None,
        held_ms=None if waited or resized else span_ms,
        capacity=weight if resized and event != "lifted" else None,
        key=key,
    )
