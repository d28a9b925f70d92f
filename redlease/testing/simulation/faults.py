"""The faults that befall a simulation, as plain data: what is drawn from a seed, shrunk, printed and given again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# What befalls one process, and what befalls the server. With True, `seconds` says how long or how late.
OF_PROCESSES = {
    "pause": True,
    "stop_after_clock": True,
    "kill": False,
    "cut": False,
    "cut_late": True,
    "silence": True,
    "lose_reply": False,
    "double_reply": False,
    "repeat_request": True,
    "lose_message": False,
    "double_message": False,
    "delay_message": True,
}
OF_SERVER = {
    "restart": True,
    "restart_without_data": True,
    "failover": True,
    "step_clock": True,
}
BREAKS = {"restart_without_data", "failover", "step_clock"}  # after these, overlap may last a lease
DOWN_S = 0.3  # how long a server is away that fails over


@dataclass(frozen=True)
class Fault:
    """One fault.

    | kind | what happens |
    | --- | --- |
    | `pause` | the process stands still for `seconds`: SIGSTOP, or an event loop that is blocked |
    | `stop_after_clock` | the same, from within a callback: right after it next reads its clock |
    | `kill` | the process is gone, as after SIGKILL |
    | `cut` | its connection is reset; what was on its way is lost |
    | `cut_late` | the same, but requests that were on their way are executed `seconds` later |
    | `silence` | nothing arrives at it or from it for `seconds`, then everything does |
    | `lose_reply` | its next call is executed, and the connection is reset instead of the reply |
    | `double_reply` | the reply to its next call comes twice |
    | `repeat_request` | its next call is executed again, `seconds` later |
    | `lose_message`, `double_message`, `delay_message` | the next message to it is lost, comes twice, or later |
    | `restart` | the server is away for `seconds`, and has its data then |
    | `restart_without_data` | the server is away for `seconds`, and has lost everything then |
    | `failover` | a replica takes over that lacks the writes of the last `seconds` |
    | `step_clock` | the server's clock is set ahead by `seconds`, or back if they are negative |

    Attributes:
        at: When, in virtual seconds since the beginning.
        kind: One of the above.
        process: The name of the process; empty for what befalls the server.
        seconds: See above.
    """

    at: float
    kind: str
    process: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            ValueError: There is no such fault, or it names a process and befalls the server, or the reverse.
        """
        if self.kind not in OF_PROCESSES | OF_SERVER:
            raise ValueError(f"there is no fault {self.kind!r}: {', '.join(OF_PROCESSES | OF_SERVER)}")
        if bool(self.process) == (self.kind in OF_SERVER):
            whose = "the server: leave `process` empty" if self.kind in OF_SERVER else "a process: name it"
            raise ValueError(f"the fault {self.kind!r} befalls {whose}")


def draw_faults(
    random: Random, processes: Sequence[str], until: float, most: int = 5, lease: float = 2.0
) -> list[Fault]:
    """Draw up to `most` faults within `until` seconds, of lengths around `lease`, in the order of their times."""
    faults = []
    for _ in range(random.randint(0, most)):
        at = round(random.uniform(0, until), 3)
        kind = random.choice(list(OF_PROCESSES)) if random.random() < 0.8 else random.choice(list(OF_SERVER))
        process = random.choice(processes) if kind in OF_PROCESSES else ""
        seconds = round(lease * random.choice([0.02, 0.2, 0.5, 0.9, 1.1, 2.0]) * random.uniform(0.8, 1.2), 3)
        if kind == "step_clock" and random.random() < 0.5:
            seconds = -seconds
        faults.append(Fault(at, kind, process, seconds if (OF_PROCESSES | OF_SERVER)[kind] else 0.0))
    return sorted(faults, key=lambda fault: fault.at)
