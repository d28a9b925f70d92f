"""What a server has done, compared with what the model does: a reply, and all that the call leaves behind."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Protocol

from paces import Paces

from redlease._core.protocol.replies import Status
from redlease.testing.entries import Limit

if TYPE_CHECKING:
    from redlease.testing.entries import Entry
    from redlease.testing.model import Model, Reply

LABEL = '["o",{}]'
EVERYTHING = (1000, 1000, 1_000_000, "", "", "", 1000)  # what inspect is asked for


class Caller(Protocol):
    """What makes the calls of a resource: `learn` is told of each, and of the last fence before it."""

    model: Model

    def learn(self, name: str, args: tuple[Any, ...], reply: Reply, fence: int) -> None: ...


class Judge:
    """Makes in the model each call that a server has made.

    Attributes:
        seen: How often each operation had each outcome: the status of an acquire or a beat, or whether the reply of
            another begins with a number above 0.
        forgotten: How often the server had deleted an idle resource.
        log: The last calls, with the server's time in µs.
    """

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        self.forgotten = 0
        self.log: deque[str] = deque(maxlen=50)

    def use(self, caller: Caller) -> None:
        """Turn to a new resource."""
        self._caller, self._paces = caller, Paces()

    @property
    def model(self) -> Model:
        """The resource."""
        return self._caller.model

    def judge(self, name: str, args: tuple[Any, ...], clock: int, reply: Reply, state: Reply, *, exists: bool) -> None:
        """Compare one call, made at `clock`, and what inspect told after it; `exists`: the resource did before it."""
        self.model.clock = clock
        if not exists and self.model.kept_until:
            self._forget()
        before, had_keys = self.model.fence, self.model.has_keys
        expected = getattr(self.model, name)(*(arg for arg in args if arg != LABEL))
        got = reply[1:]
        if name == "acquire" and got[0] == Status.GRANTED and len(got) < len(expected):
            got = [*got, 0]  # the usual case spares the declaration
        self.log.append(f"{clock} {name}{args} -> {got}")
        if had_keys or self.model.has_keys:
            got, expected = (without_guesses(name, reply) for reply in (got, expected))
        assert got == expected, f"the model replies {expected}"
        self.seen[name, int(got[0]) if name in {"acquire", "beat"} else min(1, int(got[0]))] += 1
        self._paces.judge(self.model, name, before)
        self._caller.learn(name, args, got, before)
        self._judge_state(state)

    def _judge_state(self, state: Reply) -> None:
        """Compare what inspect told with the model, at the moment at which it looked."""
        _, now, _, capacity, *_ = state
        self.model.clock = max(self.model.clock, now * 1000)
        if not capacity and self.model.capacity:
            self._forget()
        expected = snapshot(self.model)
        assert state[2:] == expected, f"inspect told {state[2:]}, and the model {expected}"

    def _forget(self) -> None:
        """The server has deleted the resource, which it may do when nothing is left of it and its time is over."""
        assert self.model.now >= self.model.kept_until, "deleted too early"
        self.forgotten += 1
        self._caller.model = self.model.forgotten()

    def told(self) -> str:
        """Return the model and the last calls."""
        return "\n".join(["the last calls:", *self.log, f"{self.model}"])


def without_guesses(name: str, reply: Reply) -> Reply:
    """Leave out how many requests are ahead, which is a guess where requests have keys."""
    if name == "position":
        return [min(reply[0], 1)]
    guess = {"acquire": 2, "beat": 1}.get(name, 0)
    return [*reply[:guess], *reply[guess + 1 :]] if guess and reply[0] == Status.QUEUED else reply


def snapshot(model: Model) -> Reply:
    """Return what inspect tells: the last fence, the capacity, how much is in use, who holds and who waits."""
    live = [held for held in model.held.values() if model.is_live(held)]
    held = [(each.deadline, each.ticket.encode(), each.deadline, record(each)) for each in live]
    delays = [delay for delay in model.delays if delay.until > model.now]
    held += [(each.until, each.name, each.until, b"%d 0 0 %d - - " % (each.weight, each.since)) for each in delays]
    limits = [limit for limit in model.limits.values() if limit.until > model.now]
    held += [(each.score, each.name, each.until, limit_record(model, each)) for each in limits]
    in_use = sum(each.weight for each in model.held.values() if each.deadline + model.lock_delay > model.now)
    waiters = [queued for queued in model.waiters() if model.is_live(queued)]
    named = [model.limits.get(Limit.named(kind, "")) for kind in ("limit", "pause", "back", "rate", "each")]
    of_resource = [limit for limit in named if limit and limit.until > model.now]
    return [
        *(model.fence, model.capacity, in_use + sum(delay.weight for delay in delays), len(waiters)),
        [part for _, name, deadline, text in sorted(held) for part in (name, deadline, text)],
        [part for each in waiters for part in (each.ticket.encode(), record(each))],
        [],
        [part for each in of_resource for part in (each.name, each.until, limit_record(model, each))],
    ]


def limit_record(model: Model, limit: Limit) -> bytes:
    """Return the record of a limit."""
    label = '["",{}]' if limit.kind in {"rate", "tat"} else LABEL
    return f"{limit.kept(model.capacity)} {limit.tat} {limit.units} {limit.since} - - {label}".encode()


def record(entry: Entry) -> bytes:
    """Return the record of a ticket, as the prelude of the scripts describes it."""
    (place, request), *others = entry.claims
    shared = "0" if others else ""
    requests = request + "".join(f"{{{other}}}{its}" for other, its in others)
    fence = f"{'0' if entry.is_replaced else ''}{entry.fence}"
    return f"{shared}{entry.weight} {fence} {entry.lease} {entry.since} {place} {requests} {LABEL}".encode()
