"""One trial: one workload with one library in a process of its own, so that none bears what another left behind.

Run as a program it prints what the trial showed as a line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleet import FLEET
from growth import GROWTH
from meter import Meter
from peers import BEFORE, PEERS
from workloads import SCALING, WORKLOADS, Outcome

EVERY_WORKLOAD = WORKLOADS | SCALING | GROWTH | FLEET
TRIAL_S_MAX = 180.0


class TrialFailed(Exception):
    """The process ended without a result; the message has the last of what it said."""


def try_out(peer: str, workload: str, url: str, **size: Any) -> Outcome:
    """Runs a trial, and returns what it showed.

    Args:
        peer: A key of `PEERS`.
        workload: A key of `EVERY_WORKLOAD`.
        url: Of a server that nobody else uses; what it keeps is deleted.
        **size: Arguments of the workload that differ from the usual.

    Raises:
        TrialFailed: It failed, or took longer than three minutes.
    """
    command = [sys.executable, str(Path(__file__)), peer, workload, url, json.dumps(size)]
    # Python may have been told not to look for modules beside the one that it runs.
    before = [os.environ[BEFORE]] if peer == "before" else []
    places = [*before, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TRIAL_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"{workload} with {peer} took more than {TRIAL_S_MAX:.0f} s") from None
    if ended.returncode != 0:
        raise TrialFailed(f"{workload} with {peer}: {ended.stderr.strip()[-2000:]}")
    return Outcome(**json.loads(ended.stdout))


def main() -> None:
    """Does what the arguments say."""
    peer_key, workload_key, url, size = sys.argv[1:]
    workload = EVERY_WORKLOAD[workload_key]
    peer = PEERS[peer_key](url, workload.terms)
    meter = Meter(url)
    meter.empty()

    async def trial() -> None:
        await peer.open()
        outcome = await workload.run(peer, meter, **workload.size | json.loads(size))
        sys.stdout.write(json.dumps(asdict(outcome)))
        sys.stdout.flush()
        # Some workloads leave thousands of callers, whose going would take longer than the trial.
        os._exit(0)

    peer.callers.run(trial())


if __name__ == "__main__":
    main()
