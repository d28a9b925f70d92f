"""The models of `spec/Lock.tla`: one resource, its clients, and a network that loses, delays and doubles messages."""

from __future__ import annotations

from specification import Broken, Constants, Specification

FAULTS = ("Losses", "Delays", "Resends", "Withdrawals", "Crashes", "Wipes", "Steps", "Writes")
USUAL: dict[str, object] = {"Clients": "{a, b}", "Capacity": 1, "Requests": 1, "Lease": 2, "WaiterLease": 2, "Clock": 4}

# Time ends at `Clock`. `Clock` 0: time has no end.
MODELS: dict[str, Constants] = {
    "late messages": {"Requests": 2, "Delays": 1},
    "doubled requests": {"Requests": 2, "Delays": 1, "Resends": 1, "Withdrawals": 1, "Clock": 3},
    "lost messages": {"Losses": 1, "Delays": 1, "Withdrawals": 1},
    "lost data": {"Requests": 2, "Wipes": 1},
    "a clock that is stepped": {"Delays": 1, "Steps": 1},
    "a queue of two": {"Clients": "{a, b, c}", "Delays": 1, "Resends": 1, "Clock": 3},
    "a pool of two": {"Clients": "{a, b, c}", "Capacity": 2, "Clock": 3},
    "late writes": {"Writes": 2, "Delays": 1},
    "everybody is served": {"Crashes": 1, "Losses": 1, "Clock": 0},
}
SHORTER: dict[str, Constants] = {
    "late messages": {"Clock": 2},
    "doubled requests": {"Clock": 1},
    "lost messages": {"Clock": 2},
    "lost data": {"Clock": 2},
    "a clock that is stepped": {"Clock": 2},
    "a queue of two": {"Clock": 1},
    "a pool of two": {"Clock": 1},
    "late writes": {"Clock": 2},
    "everybody is served": {"Lease": 1},
}

BROKEN = (
    Broken("capacity", "late messages", "Exclusion"),
    Broken("reap", "everybody is served", "Served"),
    Broken("remove dead waiters", "everybody is served", "Served"),
    Broken("ask after grants", "everybody is served", "Served"),
    Broken("behind the queue", "late messages", "Fifo"),
    Broken("same place again", "a queue of two", "Fifo"),
    Broken("same permit again", "doubled requests", "BelieversHold"),
    Broken("request id in messages", "doubled requests", "BelieversHold"),
    Broken("release by fence", "doubled requests", "BelieversHold"),
    Broken("tombstones", "doubled requests", "NothingLeft"),
    Broken("deadline from the sending", "late messages", "BelieversHold"),
    Broken("first lease is the place's", "late messages", "BelieversHold"),
    Broken("late grants end early", "late messages", "BelieversHold"),
    Broken("no revival", "late messages", "NoRevival"),
    Broken("time in the fence", "lost data", "FencesGrow"),
    Broken("last fence + 1", "a clock that is stepped", "FencesGrow"),
    Broken("guard", "late writes", "WritesInOrder"),
)

LOCK = Specification(
    "Lock",
    USUAL | dict.fromkeys(FAULTS, 0),
    MODELS,
    SHORTER,
    invariants=("Exclusion", "BelieversHold", "BeliefsExclude", "NothingLeft"),
    steps=("Fifo", "FencesGrow", "NoRevival", "WritesInOrder"),
    served={"everybody is served": ("Served",)},
    broken=BROKEN,
)
