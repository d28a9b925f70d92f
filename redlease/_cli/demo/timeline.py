"""Draws a run as one self-contained HTML page, or as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import ceil
from string import Template

from redlease._cli.plain import plain

from .evidence import Evidence, Turn, steps
from .verdict import Verdict

WIDTH, LEFT, RIGHT, TOP = 1200, 112, 24, 56
ROW, BAR, GAP, UNIT, DIGIT = 36, 20, 8, 34, 7
COLOURS = ("#4477aa", "#228833", "#b8860b", "#aa3377", "#2a9d9d", "#7a5cc0", "#c2571a", "#5a6b7b")


HATCHING = (
    '<defs><pattern id="dead" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="dead-ground"/><rect width="2.5" height="6" class="dead-stripe"/>'
    "</pattern></defs>"
)


def text(name: str, x: float | str, y: float, words: str, anchor: str = "start") -> str:
    """Returns a text element."""
    return f'<text class="{name}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


class Drawing:
    """The drawing: one row per consumer, and below them the number of permits in use."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.consumers = sorted({turn.consumer for turn in evidence.turns.values()}, key=lambda name: (len(name), name))
        self.scale = (WIDTH - LEFT - RIGHT) / max(evidence.ended_at, 0.001)
        self.rows_end = TOP + ROW * len(self.consumers)
        self.floor = self.rows_end + GAP + UNIT * (evidence.capacity + 1)

    def x(self, at: float) -> str:
        """Returns the horizontal position of a time."""
        return f"{LEFT + at * self.scale:.1f}"

    def width(self, start: float, end: float) -> str:
        """Returns the width of a span, at least a visible one."""
        return f"{max(1.5, (end - start) * self.scale):.1f}"

    def y(self, consumer: str) -> int:
        """Returns the top of a consumer's bar."""
        return TOP + ROW * self.consumers.index(consumer) + (ROW - BAR) // 2

    def colour(self, consumer: str) -> str:
        """Returns the colour of a consumer."""
        return COLOURS[self.consumers.index(consumer) % len(COLOURS)]

    def svg(self, attributes: str = "", within: str = "") -> str:
        """Returns the whole drawing, with more attributes, and more elements at its head."""
        parts = [*self._axis(), *self._inside(), *self._kill_lines(), *self._rows(), *self._kills()]
        height = self.floor + 46
        return (
            f'<svg {attributes}viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Timeline of the run">'
            f"{within}{HATCHING}{''.join(parts)}</svg>"
        )

    def _axis(self) -> Iterator[str]:
        for second in range(ceil(self.evidence.ended_at) + 1):
            if second <= self.evidence.ended_at:
                x = self.x(second)
                yield f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{self.floor}"/>'
                yield text("tick", x, self.floor + 17, str(second), "middle")
        yield text("tick", (LEFT + WIDTH - RIGHT) // 2, self.floor + 38, "seconds since the start", "middle")

    def _rows(self) -> Iterator[str]:
        for consumer in self.consumers:
            y = self.y(consumer) + BAR / 2 + 4
            dead = " gone" if self.evidence.killed(consumer) else ""
            yield text(f"name{dead}", LEFT - 12, y, consumer, "end")
        order = sorted(turn.fence for turn in self.evidence.turns.values() if turn.fence is not None)
        places = {fence: number for number, fence in enumerate(order, 1)}
        for turn in self.evidence.turns.values():
            yield from self._turn(turn, places.get(turn.fence or 0))

    def _turn(self, turn: Turn, place: int | None) -> Iterator[str]:
        kill = self.evidence.killed(turn.consumer)
        last = kill.at if kill is not None else self.evidence.ended_at
        entered = last if turn.entered_at is None else turn.entered_at
        left = last if turn.left_at is None else turn.left_at
        y, colour = self.y(turn.consumer), self.colour(turn.consumer)
        tip = f"<title>{escape(_text(turn, place, entered, left))}</title>"
        yield (
            f'<rect class="waiting" x="{self.x(turn.asked_at)}" y="{y + 6}" height="{BAR - 12}" fill="{colour}" '
            f'width="{self.width(turn.asked_at, entered)}">{tip}</rect>'
        )
        if turn.entered_at is not None:
            yield (
                f'<rect class="holding" x="{self.x(entered)}" y="{y}" height="{BAR}" rx="2" fill="{colour}" '
                f'width="{self.width(entered, left)}">{tip}</rect>'
            )
            if (left - entered) * self.scale > DIGIT * len(str(place)):
                yield text("place", self.x((entered + left) / 2), y + BAR / 2 + 3.5, str(place), "middle")

    # Permits in use

    def _inside(self) -> Iterator[str]:
        evidence = self.evidence
        living = evidence.living()
        dead = [(kill.holds_from or 0.0, kill.holds_until) for kill in evidence.kills if kill.holds_until is not None]
        yield self._area("taken", steps([*living, *dead]))
        yield self._area("living", steps(living))
        for count in range(evidence.capacity + 1):
            y = self.floor - UNIT * count
            yield text("tick", LEFT - 12, y + 4, str(count), "end")
        top = self.floor - UNIT * evidence.capacity
        yield f'<line class="capacity" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top}" y2="{top}"/>'
        yield text("heading", WIDTH - RIGHT, top - 7, f"capacity {evidence.capacity}", "end")
        yield text("heading", LEFT, top - 7, "inside at once")

    def _area(self, name: str, line: list[tuple[float, int]]) -> str:
        path, y = [f"M{LEFT} {self.floor}"], self.floor
        for at, count in line:
            x = self.x(at)
            path.append(f"L{x} {y}")
            y = self.floor - UNIT * count
            path.append(f"L{x} {y}")
        return f'<path class="{name}" d="{"".join(path)}L{path[-1][1:].split()[0]} {self.floor}Z"/>'

    # Kills: their lines are drawn behind the bars, the rest in front of them

    def _kill_lines(self) -> Iterator[str]:
        for kill in self.evidence.kills:
            x = self.x(kill.at)
            yield f'<line class="kill" x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{self.floor}"/>'

    def _kills(self) -> Iterator[str]:
        for kill in self.evidence.kills:
            x, y = float(self.x(kill.at)), self.y(kill.consumer)
            gone_at = kill.gone_at if kill.gone_at is not None else self.evidence.ended_at
            spent = f"{gone_at - kill.at:.2f} s until the lease of {kill.consumer} had ended"
            yield (
                f'<rect class="lapsing" x="{x:.1f}" y="{y}" width="{self.width(kill.at, gone_at)}" height="{BAR}">'
                f"<title>{escape(spent)}</title></rect>"
            )
            yield text("kill-name", x, TOP - 30, f"kill -9: {kill.consumer}", "middle")
            yield text(
                "kill-name", x, TOP - 14, "while it held" if kill.kind == "holder" else "while it waited", "middle"
            )
            middle = y + BAR / 2
            arms = f"M{x - 5:.1f} {middle - 5}l10 10m0 -10l-10 10"
            yield f'<circle class="kill-spot" cx="{x:.1f}" cy="{middle}" r="10"/><path class="kill-cross" d="{arms}"/>'


def _text(turn: Turn, place: int | None, entered: float, left: float) -> str:
    lines = [f"ticket {turn.ticket}", f"waited {entered - turn.asked_at:.3f} s from {turn.asked_at:.3f} s"]
    if turn.entered_at is not None:
        lines += [f"held {left - entered:.3f} s from {entered:.3f} s", f"grant {place}, fence {turn.fence}"]
    return "\n".join(lines)


def draw(evidence: Evidence, verdict: Verdict) -> str:
    """Returns the page."""
    most = max(verdict.most_inside, verdict.most_permits)
    facts = [
        (str(verdict.grants), "grants", True),
        (f"{most} of {verdict.capacity}", "most inside at once", most <= verdict.capacity),
        ("yes" if verdict.in_arrival_order else "no", "in order of arrival", verdict.in_arrival_order),
        ("yes" if verdict.fences_increasing else "no", "fences increasing", verdict.fences_increasing),
    ]
    for kill in verdict.kills:
        lost = "not recovered" if kill.seconds_lost is None else f"{kill.seconds_lost:.2f} s"
        facts.append((lost, f"to get over a dead {kill.what}; lease {kill.lease:g} s", kill.recovered_within_lease))
    tiles = "".join(
        f'<li class="{"kept" if kept else "broken"}"><b>{escape(value)}</b><span>{escape(name)}</span></li>'
        for value, name, kept in facts
    )
    outcome = "Every promise was kept." if verdict.promises_kept else "A promise was broken."
    return PAGE.substitute(
        title=f"{verdict.consumers} processes share {verdict.capacity} permits",
        outcome=outcome,
        failures="".join(f"<p class='broken'>{escape(plain(failure))}</p>" for failure in verdict.failures),
        resource=escape(evidence.resource),
        seconds=f"{verdict.seconds:.1f}",
        tiles=tiles,
        drawing=Drawing(evidence).svg(),
        colours=PALETTE,
        style=STYLE,
    )


def picture(evidence: Evidence) -> str:
    """Returns the drawing alone, as an SVG file that is light or dark as its reader has it."""
    font = 'text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif }'
    return Drawing(evidence).svg(
        'xmlns="http://www.w3.org/2000/svg" ',
        f'<style>{PALETTE}\n{font}\n{STYLE}</style><rect width="100%" height="100%" fill="var(--ground)"/>',
    )


PALETTE = """:root { --ground: #fff; --ink: #1d2733; --soft: #5d6b7a; --line: #e4e8ec;
  --red: #c8102e; --living: #8fa3b5; --good: #1a7f45 }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14191f; --ink: #e6ebf0; --soft: #98a6b3; --line: #29323b;
    --red: #ff6b7d; --living: #56697a; --good: #5fca8c }
}"""

STYLE = """text { fill: var(--ink) }
.tick { fill: var(--soft) }
.grid { stroke: var(--line) }
.heading { font-weight: 600 }
.name { font-size: 13px }
.name.gone { fill: var(--red); font-weight: 600 }
.waiting { opacity: .3 }
.place { fill: #fff; font-size: 11px; font-weight: 600; pointer-events: none }
.living { fill: var(--living) }
.taken, .lapsing { fill: url(#dead) }
.lapsing { stroke: var(--red) }
.dead-ground { fill: var(--ground) }
.dead-stripe { fill: var(--red); opacity: .55 }
.capacity { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 7 4 }
.kill { stroke: var(--red); stroke-width: 1.2; stroke-dasharray: 3 3 }
.kill-name { fill: var(--red); font-weight: 600 }
.kill-spot { fill: var(--ground); stroke: var(--red); stroke-width: 2 }
.kill-cross { fill: none; stroke: var(--red); stroke-width: 2.6 }"""

PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>redlease demo: $title</title>
<style>
$colours
body, svg { font-family: system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif }
body { margin: 28px auto; max-width: 1240px; padding: 0 20px; background: var(--ground); color: var(--ink);
  font-size: 15px; line-height: 1.45 }
h1 { font-size: 24px; margin: 0 0 4px; font-weight: 650 }
p { margin: 0; color: var(--soft) }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: 12px; padding: 0; margin: 20px 0 8px }
.tiles li { border: 1px solid var(--line); border-left: 4px solid var(--good); border-radius: 6px;
  padding: 8px 16px 8px 12px }
.tiles li.broken { border-left-color: var(--red) }
.tiles b { display: block; font-size: 19px; font-weight: 650 }
.tiles span, .legend { color: var(--soft); font-size: 13px }
.broken, .broken b { color: var(--red) }
svg { display: block; width: 100%; height: auto; font-size: 12px }
.legend { gap: 24px; margin: 4px 0 20px 112px }
.legend svg { display: inline; width: 26px; height: 14px; vertical-align: -2px; margin-right: 7px }
$style
</style>
<h1>$title</h1>
<p>$outcome Resource $resource, $seconds seconds.</p>
$failures
<ul class="tiles">$tiles</ul>
$drawing
<ul class="legend">
<li><svg><rect y="4" width="26" height="7" fill="#4477aa" opacity=".3"/></svg>waits</li>
<li><svg><rect width="26" height="14" rx="2" fill="#4477aa"/></svg>holds; the number is its place in the order of
grants</li>
<li><svg><rect width="26" height="14" class="lapsing"/></svg>dead: its lease runs out</li>
<li>Point at a bar for its ticket and its fence.</li>
</ul>
</html>
""")
