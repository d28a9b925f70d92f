"""The histories of every release replay on this one, without Redis. `tests/support/record_histories.py` records."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from record_histories import HISTORIES, PATTERNS, version
from recorded_flows import WORKFLOWS
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from redlease_temporal._plugin.runtime import LIBRARY_WORKFLOWS
from redlease_temporal.worker import RedleasePlugin

if TYPE_CHECKING:
    from quiet import Quiet

RECORDED = sorted(HISTORIES.glob("*/*.json"))


def replayer() -> Replayer:
    """Return what replays users' workflows, and the library's own, with a plugin whose Redis does not exist."""
    return Replayer(workflows=WORKFLOWS, plugins=[RedleasePlugin("redis://nowhere.invalid")])


def history_of(path: Path, text: str | None = None) -> WorkflowHistory:
    """Return the history in a file, or in the text that it has been changed to."""
    return WorkflowHistory.from_json(f"golden-{path.stem}", text or path.read_text())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
async def test_a_recorded_history_replays(path: Path) -> None:
    """What a release has written into users' histories is what this code comes to again."""
    await replayer().replay_workflow(history_of(path))


async def test_a_replayer_that_was_given_the_librarys_workflows() -> None:
    """Who passed them himself may go on doing so."""
    given = Replayer(workflows=[*WORKFLOWS, *LIBRARY_WORKFLOWS], plugins=[RedleasePlugin()])
    await given.replay_workflow(history_of(HISTORIES / version() / "coordinator_resource_workflow_itself.json"))


def test_every_pattern_is_recorded() -> None:
    """This release has a history of each pattern."""
    assert {path.stem for path in RECORDED if path.parent.name == version()} == set(PATTERNS)


# A history, and what stands in it in place of what.
CHANGES = {
    "another activity": ("contended", "redlease.wait", "redlease.other"),
    "another activity id": ("contended", "redlease:1:pool:wait", "redlease:2:pool:wait"),
    "another local activity": ("uncontended", "redlease.enqueue", "redlease.check"),
    "another local activity id": ("uncontended", "redlease:1:pool", "redlease:2:pool"),
    "no place": ("limited", "redlease.admit", "redlease.check"),
    "no place for a child": ("limited_children", "redlease.reserve", "redlease.check"),
    "another sequence": ("in_sequence", "sequence:in_sequence", "sequence:other"),
    "another activity of a place": ("place", "redlease.admission_slot_owner", "redlease.other"),
    "no release": ("cancelled", "redlease.release", "redlease.renew"),
    "another slot": ("slots_contended", "permit:slots_contended:0", "permit:slots_contended:1"),
    "another question": ("coordinator_contended", "redlease.coordinator.request", "redlease.coordinator.check"),
    "another downgrade": ("downgraded", "redlease.downgrade", "redlease.other"),
    "another order": ("together", "redlease:1:together-a", "redlease:1:together-b"),
    "another look": ("slots_resource_workflow_itself", "redlease.slots.notify", "redlease.slots.idle"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_history_does_not_replay(change: str, quiet: Quiet) -> None:
    """A history that this code would not have written is refused: the tests above would notice a changed command."""
    quiet.allow(r"[Nn]on-?[Dd]etermini|TMPRL110[01]")
    name, old, new = CHANGES[change]
    path = HISTORIES / version() / f"{name}.json"
    with pytest.raises(workflow.NondeterminismError):
        await replayer().replay_workflow(history_of(path, changed(path, old, new)))


def changed(path: Path, old: str, new: str) -> str:
    """Return the history with one text in place of another, in payloads too."""

    def change(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: change(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [change(one) for one in value]
        if key == "data":
            return base64.b64encode(base64.b64decode(value).replace(old.encode(), new.encode())).decode()
        return value.replace(old, new) if isinstance(value, str) else value

    return json.dumps(change(json.loads(path.read_text())))
