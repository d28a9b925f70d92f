"""The models of `spec/Relay.tla`: the relays of the Temporal adapter, which share the permits of workflow runs."""

from __future__ import annotations

from specification import Broken, Constants, Specification

FAULTS = ("Doubles", "Releases", "Successions", "Handovers", "Ends", "Crashes", "Stalls", "Losses", "Wipes", "Outages")
USUAL: dict[str, object] = {"Relays": "{r, s}", "Lease": 2, "Window": 1, "Grace": 1}

MODELS: dict[str, Constants] = {
    "late executions": {"Ends": 1, "Releases": 1, "Doubles": 1, "Stalls": 1},
    "resets and successors": {"Ends": 1, "Successions": 1, "Stalls": 1},
    "another workflow adopts": {"Handovers": 1, "Doubles": 1, "Stalls": 1},
    "relays that stand still": {"Ends": 1, "Losses": 1, "Stalls": 2},
    "nobody knows of it": {"Releases": 1, "Doubles": 1},
    "a task is executed again": {"Releases": 2, "Doubles": 1, "Crashes": 1},
    "a run ends": {"Ends": 1},
    "nobody adopts": {"Successions": 1},
    "Temporal is away": {"Ends": 1, "Outages": 1},
    "a relay dies": {"Crashes": 1},
    "replies are lost": {"Ends": 1, "Losses": 1},
    "Redis loses its data": {"Wipes": 1},
}
SHORTER: dict[str, Constants] = {
    "late executions": {"Stalls": 0},
    "resets and successors": {"Stalls": 0},
    "another workflow adopts": {"Stalls": 0},
    "relays that stand still": {"Stalls": 1},
}

BROKEN = (
    Broken("release when it is recorded", "late executions", "OpenRunsKeep"),
    Broken("a release is in the record", "a task is executed again", "NothingKept"),
    Broken("late copies keep the release", "nobody knows of it", "NothingKept"),
    Broken("release by fence", "another workflow adopts", "OpenRunsKeep"),
    Broken("give back what was recorded", "another workflow adopts", "OpenRunsKeep"),
    Broken("continued runs are followed", "resets and successors", "OpenRunsKeep"),
    Broken("resets are followed", "resets and successors", "OpenRunsKeep"),
    Broken("NOT_FOUND is no answer", "relays that stand still", "OpenRunsKeep"),
    Broken("this grant in the history", "nobody knows of it", "NothingKept"),
    Broken("undelivered grants expire", "nobody knows of it", "NothingKept"),
    Broken("a closed run holds nothing", "a run ends", "NothingKept"),
    Broken("time to adopt", "nobody adopts", "NothingKept"),
    Broken("grace while nothing is known", "Temporal is away", "NothingKept"),
    Broken("new request after a withdrawal", "nobody knows of it", "Served"),
    Broken("records are taken over", "a relay dies", "LookedAfter"),
    Broken("what is its own is looked for", "replies are lost", "LookedAfter"),
    Broken("claim again after a loss of data", "Redis loses its data", "LossIsTold"),
)

RELAY = Specification(
    "Relay",
    USUAL | dict.fromkeys(FAULTS, 0),
    MODELS,
    SHORTER,
    invariants=("OneHolder",),
    steps=("OpenRunsKeep",),
    served={
        "nobody knows of it": ("NothingKept", "Served"),
        "a task is executed again": ("NothingKept",),
        "a run ends": ("NothingKept",),
        "nobody adopts": ("NothingKept",),
        "Temporal is away": ("NothingKept",),
        "a relay dies": ("Served", "LookedAfter"),
        "replies are lost": ("Served", "LookedAfter"),
        "Redis loses its data": ("LossIsTold",),
    },
    broken=BROKEN,
)
