"""How the workflows that keep resources know a run's requests."""

from __future__ import annotations

import hashlib

from temporalio import workflow

from .calls import Adopting, Wish
from .coordinator_calls import Adoption, Requester


def request_name(wish: Wish) -> str:
    """Names a request of this run: the same in replays and after a reset, another one in the next run of the chain."""
    number = wish.local_id.split(":")[1]
    resource = hashlib.sha256(wish.terms.resource.encode()).hexdigest()[:16]
    return f"{workflow.info().original_execution_run_id}/{number}/{resource}"


def requester_of(wish: Wish, name: str) -> Requester:
    """This run, asking under that name."""
    info = workflow.info()
    return Requester(info.workflow_id, info.run_id, wish.chain, name)


def adoption_of(adopting: Adopting) -> Adoption:
    """What the workflow that keeps a permit is told of its adoption by this run."""
    wish, permit = adopting.wish, adopting.permit
    return Adoption(
        permit.ticket,
        permit.fence,
        requester_of(wish, request_name(wish)),
        wish.terms.lease_ms,
        wish.on_close,
        wish.max_hold_ms,
        adopting.refence,
    )
