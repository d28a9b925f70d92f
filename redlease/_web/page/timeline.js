// The history as a timeline: a row for each owner, and below the rows the units in use.

import { byId, keyed, make, makeSvg, setAll, setText } from "./dom.js";
import { begins, lanesOf, spansOf, usage } from "./spans.js";
import { updateWho, whoParts } from "./who.js";
import { UNLIMITED, colourOf, counted, plain, span as spanText } from "./words.js";

const LANES_MOST = 24;
const BAR = 16;
const AREA = 56;
const TICK = 20;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].map((each) => each * 1000);

let parts = null; // the drawing and its groups, which stay while their contents change

export function drawTimeline(snapshot, history, now) {
  drawEntries(history, now);
  const spans = spansOf(snapshot, history, now);
  const isKept = history.length > 0;
  byId("timeline").hidden = byId("legend").hidden = byId("range-label").hidden = spans.length === 0;
  setText(byId("timeline-note"), noteOn(isKept, spans.length));
  if (spans.length === 0) return;
  const window = windowOf(spans, now);
  const { lanes, left } = lanesOf(spans.filter((each) => (each.to ?? now) >= window.from), LANES_MOST);
  if (left > 0) setText(byId("timeline-note"), `${counted(left, "more row is", "more rows are")} not drawn.`);
  draw(frameOf(window, lanes.length), window, lanes, spans, snapshot.capacity);
}

function noteOn(isKept, count) {
  if (isKept) return "";
  const drawn = count ? "Only what is held and waited for now is drawn: no" : "No";
  return `${drawn} history is kept of this resource. Clients ask for one with history=1000.`;
}

function windowOf(spans, now) {
  const range = Number(byId("range").value);
  const first = Math.min(...spans.map(begins));
  const from = Math.max(Math.min(first, now - 1000), range ? now - range : 0);
  return { from, to: now };
}

function frameOf(window, count) {
  const width = Math.max(280, byId("timeline").clientWidth);
  const narrow = width < 560;
  const [left, top, row] = narrow ? [0, 6, 36] : [132, 6, 24];
  const bottom = top + row * count;
  const scale = (width - left - 8) / (window.to - window.from);
  const x = (at) => left + (Math.min(Math.max(at, window.from), window.to) - window.from) * scale;
  return { width, narrow, left, top, row, bottom, floor: bottom + 12 + AREA, x };
}

function draw(frame, window, lanes, spans, capacity) {
  if (parts === null) {
    const [grid, area, rows] = ["grid", "area", "rows"].map((name) => makeSvg("g", { class: name }));
    const svg = makeSvg("svg", { role: "img", "aria-label": "Timeline; the list of the history below says the same" }, grid, area, rows);
    byId("timeline").append(svg);
    parts = { svg, grid, area, rows };
  }
  const height = frame.floor + TICK;
  setAll(parts.svg, { width: frame.width, height, viewBox: `0 0 ${frame.width} ${height}` });
  drawGrid(frame, window);
  drawRows(frame, window, lanes);
  drawArea(frame, window, spans, capacity);
}

function drawGrid(frame, window) {
  const room = (frame.width - frame.left) / 84;
  const step = STEPS.find((each) => (window.to - window.from) / each <= room) ?? STEPS.at(-1);
  const ticks = [];
  for (let at = Math.ceil(window.from / step) * step; at <= window.to; at += step) ticks.push(at);
  keyed(parts.grid, ticks, (at) => at, () => makeSvg("g", {}, makeSvg("line"), makeSvg("text")), (node, at) => {
    const x = frame.x(at).toFixed(1);
    setAll(node.firstElementChild, { x1: x, x2: x, y1: 0, y2: frame.floor });
    const near = frame.width - x < 30 ? "end" : x - frame.left < 30 ? "start" : "middle";
    setAll(node.lastElementChild, { x, y: frame.floor + 15, "text-anchor": near });
    setText(node.lastElementChild, new Date(at).toLocaleTimeString("en-GB"));
  });
}

function drawRows(frame, window, lanes) {
  keyed(parts.rows, lanes, (lane) => lane.key, () => makeSvg("g", {}, makeSvg("text"), makeSvg("g")), (node, lane) => {
    const y = frame.top + frame.row * lanes.indexOf(lane);
    const [name, bars] = node.children;
    const at = frame.narrow ? { x: 0, y: y + 11, "text-anchor": "start" } : { x: frame.left - 10, y: y + BAR - 3, "text-anchor": "end" };
    setAll(name, at);
    setText(name, lane.index ? "" : cut(plain(lane.owner), frame.narrow ? 40 : 18));
    const top = frame.narrow ? y + 15 : y;
    const seen = lane.lane.filter((each) => (each.to ?? window.to) >= window.from);
    keyed(bars, seen, (each) => each.key, createBar, (bar, each) => updateBar(bar, each, frame, window, top));
  });
}

function createBar() {
  return makeSvg("g", {}, makeSvg("title"), makeSvg("rect", { rx: 1 }), makeSvg("rect", { rx: 2 }), makeSvg("path"));
}

function updateBar(bar, span, frame, window, y) {
  const [title, waiting, holding, end] = bar.children;
  const to = span.to ?? window.to;
  setAll(bar, { class: `bar ${colourOf(span.owner)} ${span.end ?? "lasting"}` });
  setText(title, told(span, to));
  setAll(waiting, { class: "waiting", ...extent(frame, span.waited, span.from ?? to), y: y + 5, height: BAR - 10 });
  setAll(holding, { class: "holding", ...extent(frame, span.from, to), y, height: BAR });
  const x = frame.x(to);
  const marked = span.to !== null && span.to >= window.from && (span.end === "lost" || span.end === "forced");
  setAll(end, { class: "end", d: marked ? `M${(x - 4).toFixed(1)} ${y + 4}l8 8m0 -8l-8 8` : "" });
}

function extent(frame, from, to) {
  if (from === null) return { x: 0, width: 0 };
  const [x, end] = [frame.x(from), frame.x(to)];
  return { x: x.toFixed(1), width: (end > x ? Math.max(1.5, end - x) : 0).toFixed(1) };
}

function told(span, to) {
  const lines = [`ticket ${plain(span.ticket)}`, `owner ${plain(span.owner)}`];
  if (span.waited !== null) lines.push(`waited ${spanText((span.from ?? to) - span.waited)}`);
  if (span.from !== null) lines.push(`${span.to === null ? "has held" : "held"} ${spanText(to - span.from)}`, `fence ${span.fence}`);
  if (span.end !== null) lines.push(WORDS[span.end]);
  return lines.join("\n");
}

const WORDS = {
  granted: "granted",
  released: "released",
  lost: "lost its lease",
  forced: "released by an operator",
  adopted: "adopted under a new fence",
  reduced: "reduced",
  superseded: "replaced by a newer request",
};

function wordsOf({ event, ticket: key, capacity }) {
  const of = key ? ` of key ${plain(key)}` : "";
  if (event === "resized") return `capacity is ${capacity}`;
  if (event === "limited") return capacity === null ? `limit${of} set` : `limit${of} is ${capacity}`;
  if (event === "lifted") return `limit${of} lifted`;
  return WORDS[event];
}

function drawArea(frame, window, spans, capacity) {
  const steps = usage(spans, window.to);
  const limited = capacity !== null && capacity !== UNLIMITED;
  const peak = Math.max(1, ...steps.map(([, used]) => Math.min(used, UNLIMITED)), limited ? capacity : 0);
  const y = (used) => (frame.floor - (Math.min(used, peak) / peak) * (AREA - 8)).toFixed(1);
  let path = `M${frame.x(window.from).toFixed(1)} ${frame.floor}`;
  let before = 0;
  for (const [at, used] of steps) {
    path += `L${frame.x(at).toFixed(1)} ${y(before)}L${frame.x(at).toFixed(1)} ${y(used)}`;
    before = used;
  }
  const items = [["in-use", "path", { d: `${path}Z` }]];
  if (limited) items.push(["capacity", "line", { x1: frame.left, x2: frame.width - 8, y1: y(capacity), y2: y(capacity) }]);
  if (!frame.narrow) items.push(["label", "text", { x: frame.left - 10, y: frame.floor - 4, "text-anchor": "end" }, "units in use"]);
  if (limited && !frame.narrow) items.push(["limit", "text", { x: frame.left - 10, y: Number(y(capacity)) + 4, "text-anchor": "end" }, `capacity ${capacity}`]);
  keyed(parts.area, items, ([name]) => name, ([, tag]) => makeSvg(tag), (node, [name, , attributes, text]) => {
    setAll(node, { class: name, ...attributes });
    if (text) setText(node, text);
  });
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function drawEntries(history, now) {
  byId("events").hidden = history.length === 0;
  if (!byId("events").open) return;
  keyed(byId("entries"), history.toReversed(), (entry) => entry.id, createEntry, (row, entry) => setText(row.children[3], spanText(now - entry.at_ms)));
}

function createEntry(entry) {
  const who = make("th", "", ...whoParts());
  who.scope = "row";
  updateWho(who, entry);
  const after = entry.held_ms ?? entry.waited_ms;
  const cells = [["event", wordsOf(entry)], ["fence", entry.fence || "–"], ["ago", ""], ["after", after === null ? "–" : spanText(after)]];
  return make("tr", entry.event, who, ...cells.map(([label, text], index) => {
    const cell = make("td", index > 0 ? "number" : "what", String(text));
    cell.dataset.label = label;
    return cell;
  }));
}
