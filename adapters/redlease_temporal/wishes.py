"""How the workflows that keep resources know a run's requests."""

from __future__ import annotations

import hashlib

from temporalio import workflow

from .calls import Wish
from .coordinator_calls import Requester


def request_name(wish: Wish) -> str:
    """Names a request of this run: the same in replays and after a reset, another one in the next run of the chain."""
    number = wish.local_id.split(":")[1]
    resource = hashlib.sha256(wish.terms.resource.encode()).hexdigest()[:16]
    return f"{workflow.info().original_execution_run_id}/{number}/{resource}"


def requester_of(wish: Wish, name: str) -> Requester:
    """This run, asking under that name."""
    info = workflow.info()
    return Requester(info.workflow_id, info.run_id, wish.chain, name)
