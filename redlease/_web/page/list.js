// The list of all resources.

import { byId, keyed, make, setText } from "./dom.js";
import { UNLIMITED, plain, span, units } from "./words.js";

let shown = null; // the last overview, and when it came
let chosen = null;
let standing = []; // the order of the names while somebody points at the list

const ORDERS = {
  resource: (a, b) => (a.resource < b.resource ? -1 : 1),
  waiting: (a, b) => b.waiting - a.waiting || ORDERS.resource(a, b),
  longest_wait_ms: (a, b) => longest(b.longest_wait_ms) - longest(a.longest_wait_ms) || ORDERS.resource(a, b),
  longest_hold_ms: (a, b) => longest(b.longest_hold_ms) - longest(a.longest_hold_ms) || ORDERS.resource(a, b),
};

const longest = (ms) => ms ?? -1;

export const addressOf = (name) => `?resource=${encodeURIComponent(name)}`;

export function showOverview(overview) {
  shown = { overview, at: performance.now() };
  drawList();
}

export function markChosen(name) {
  chosen = name;
  drawList();
}

// Draws the list as it is now: waits and holds have grown since the server told of them.
export function drawList() {
  if (shown === null) return;
  const { overview, at } = shown;
  const since = performance.now() - at;
  setText(byId("total-resources"), overview.resources.toLocaleString("en"));
  setText(byId("total-held"), overview.held.toLocaleString("en"));
  setText(byId("total-waiting"), overview.waiting.toLocaleString("en"));
  setText(byId("total-wait"), overview.waiting ? span(overview.longest_wait_ms + since) : "–");
  const wanted = byId("filter").value.toLowerCase();
  const rows = inOrder(overview.listed.filter((each) => each.resource.toLowerCase().includes(wanted)));
  keyed(byId("resources"), rows, (each) => each.resource, createRow, (row, each) => updateRow(row, each, since));
  setText(byId("list-note"), noteOn(overview, rows.length));
}

// Nothing moves under a pointer or a focus: what is new comes last until it is elsewhere.
function inOrder(rows) {
  const order = ORDERS[byId("order").value];
  const sorted = rows.toSorted((a, b) => Boolean(b.error) - Boolean(a.error) || order(a, b));
  const body = byId("resources");
  if (!body.matches(":hover") && !body.contains(document.activeElement)) {
    standing = sorted.map((each) => each.resource);
    return sorted;
  }
  const places = new Map(standing.map((name, place) => [name, place]));
  const placeOf = (each) => places.get(each.resource) ?? standing.length;
  return sorted.sort((a, b) => placeOf(a) - placeOf(b));
}

function noteOn(overview, count) {
  if (overview.resources === 0) return "No resource is in use under this prefix.";
  if (overview.listed.length < overview.resources) {
    return `The first ${overview.listed.length.toLocaleString("en")} are listed, by longest wait. ` +
      "Start redlease web with a pattern to see others.";
  }
  const unread = overview.listed.filter((each) => each.error);
  if (unread.length) return unread.length === 1 ? plain(unread[0].error) : `${unread.length} of them cannot be read: open one to see why.`;
  return count === 0 ? "No name contains that." : "";
}

function createRow(each) {
  const link = make("a", "name", plain(each.resource));
  link.href = addressOf(each.resource);
  const name = make("th", "", link);
  name.scope = "row";
  const meter = make("span", "meter", make("span", "fill"));
  meter.setAttribute("aria-hidden", "true");
  const cells = ["held", "waiting number", "wait number", "hold number"].map((kind) => make("td", kind));
  cells[0].append(meter, make("span", "count"));
  cells[1].dataset.label = "waiting";
  cells[2].dataset.label = "longest wait";
  cells[3].dataset.label = "longest hold";
  return make("tr", "", name, ...cells);
}

function updateRow(row, each, since) {
  const [name, held, waiting, wait, hold] = row.children;
  const limited = each.capacity !== null && each.capacity !== UNLIMITED;
  const share = limited ? Math.min(1, each.in_use / each.capacity) : Math.min(1, each.in_use);
  const limit = each.limit === null ? "" : each.limit ? `, limit ${each.limit}` : ", paused";
  setText(held.lastElementChild, (limited ? `${units(each.in_use)} of ${units(each.capacity)}` : units(each.in_use)) + limit);
  held.firstElementChild.firstElementChild.style.transform = `scaleX(${share})`;
  setText(waiting, each.waiting ? each.waiting.toLocaleString("en") : "–");
  setText(wait, each.longest_wait_ms === null ? "–" : span(each.longest_wait_ms + since));
  if (each.error) setText(held.lastElementChild, "unreadable");
  setText(hold, each.longest_hold_ms === null ? "–" : span(each.longest_hold_ms + since));
  row.className = each.error ? "unreadable" : each.waiting ? "contended" : each.in_use ? "in-use" : "idle";
  const link = name.firstElementChild;
  link.title = plain(each.error ?? each.resource);
  if (each.resource === chosen) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
}
