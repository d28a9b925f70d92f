// One resource: its holders and its queue, as a picture and as tables.

import { byId, keyed, make, setText } from "./dom.js";
import { drawTimeline } from "./timeline.js";
import { updateWho, whoParts } from "./who.js";
import { UNLIMITED, colourOf, plain, span, units } from "./words.js";

const SLOTS_MOST = 48; // free units that are drawn one by one
const WIDE_MOST = 12; // units that a slot is as wide as
const QUEUED_MOST = 60; // waiters in the picture

let shown = null; // the last detail, and when it came
let entries = []; // the last history
let changes = null; // how to change the resource; null if the view is read-only

export function allowChanges(given) {
  changes = given;
  byId("resize").onclick = () => shown && changes.resize(shown.detail.snapshot);
}

// Clears what is shown, and shows the name, until the server has told of the resource.
export function openResource(name) {
  shown = null;
  entries = [];
  byId("nothing-chosen").hidden = name !== null;
  byId("chosen").hidden = name === null;
  byId("chosen").classList.add("loading");
  setText(byId("detail-title"), plain(name ?? ""));
  for (const id of ["slots", "queue", "holders", "waiters", "entries"]) {
    keyed(byId(id), [], null, null, null);
  }
}

export function showHistory(history) {
  entries = history.entries;
}

export function showDetail(detail) {
  shown = { detail, at: performance.now() };
  byId("chosen").classList.remove("loading");
  drawResource();
}

// Draws the resource as it is now: waits, holds and leases go on between the events.
export function drawResource() {
  if (shown === null) return;
  const { snapshot, known, why } = shown.detail;
  const now = snapshot.server_time_ms + performance.now() - shown.at;
  const unknown = "Nothing is known of it: it was not used under this prefix, or not of late.";
  setText(byId("facts"), why ? plain(why) : known ? factsOf(snapshot) : unknown);
  byId("chosen").classList.toggle("unread", Boolean(why) && !known);
  byId("resize").hidden = changes === null || !known;
  drawSlots(snapshot, now);
  drawQueue(snapshot);
  drawHolders(snapshot, now);
  drawWaiters(snapshot, now);
  drawTimeline(snapshot, entries, now);
}

function factsOf(snapshot) {
  const of = isLimited(snapshot) ? ` of ${units(snapshot.capacity)}` : "";
  const fence = snapshot.fence || "unknown";
  const facts = `${units(snapshot.in_use)}${of} held · ${snapshot.waiting.toLocaleString("en")} waiting · last fence ${fence}`;
  const damaged = snapshot.damaged.map(({ kind, name, reason }) => `damaged ${kind} ${plain(name)}: ${reason}`);
  return [facts, ...snapshot.limits.map(limitOf), ...damaged].join(" · ");
}

function limitOf({ kind, units: most, key, owner, reason }) {
  if (kind === "rate") return `${key === null ? "everybody" : `key ${plain(key)}`} waits for a token`;
  const what = { limit: `limited to ${most}`, per_key: `each key limited to ${most}`, pause: "paused", back_off: "held back" }[kind];
  return `${key === null ? "" : `key ${plain(key)} `}${what} by ${plain(owner)}${reason ? `: ${plain(reason)}` : ""}`;
}

const isLimited = (snapshot) => snapshot.capacity !== null && snapshot.capacity !== UNLIMITED;

// The picture

function drawSlots(snapshot, now) {
  const wide = snapshot.holders.map((permit) => ({ ...permit, key: ticketKey(permit), wide: Math.min(WIDE_MOST, permit.weight) }));
  const free = isLimited(snapshot) ? Math.max(0, snapshot.capacity - snapshot.in_use) : 0;
  const some = Math.min(free, SLOTS_MOST);
  const empty = Array.from({ length: some }, (_, index) => ({ key: `free ${index}`, weight: 0 }));
  if (free > some) empty.push({ key: "more", weight: -1, more: free - some });
  keyed(byId("slots"), [...wide, ...empty], (slot) => slot.key, createSlot, (node, slot) => updateSlot(node, slot, now));
}

function createSlot(slot) {
  if (slot.weight < 0) return make("li", "more");
  if (slot.weight === 0) return make("li", "free", make("span", "unseen", "free"));
  return make("li", "slot", make("span", "fill"), make("span", "label"));
}

function updateSlot(node, slot, now) {
  if (slot.weight < 0) setText(node, `+${slot.more.toLocaleString("en")} free`);
  if (slot.weight <= 0) return;
  const left = Math.min(1, Math.max(0, (slot.expires_at_ms - now) / slot.lease_ms));
  node.className = `slot ${colourOf(slot.owner)}`;
  node.style.setProperty("--wide", slot.wide);
  node.firstElementChild.style.transform = `scaleY(${left.toFixed(3)})`;
  setText(node.lastElementChild, slot.weight === 1 ? "" : slot.weight === UNLIMITED ? "all" : `×${units(slot.weight)}`);
  node.title = `ticket ${plain(slot.ticket)}\nowner ${plain(slot.owner)}\nfence ${slot.fence}`;
}

function drawQueue(snapshot) {
  const first = snapshot.waiters.slice(0, QUEUED_MOST).map((waiter, index) => ({ ...waiter, key: ticketKey(waiter), place: index + 1 }));
  const more = snapshot.waiting - first.length;
  const last = more > 0 ? [{ key: "more", more }] : [];
  keyed(byId("queue"), [...first, ...last], (each) => each.key, (each) => make("li", each.more ? "more" : ""), (node, each) => {
    setText(node, each.more ? `+${each.more.toLocaleString("en")}` : String(each.place));
    if (each.more) return;
    node.className = `waiter ${colourOf(each.owner)}`;
    node.title = `place ${each.place}\nticket ${plain(each.ticket)}\nowner ${plain(each.owner)}\nunits ${units(each.weight)}`;
  });
  byId("queue").classList.toggle("nobody", snapshot.waiting === 0);
}

// The tables

// Holders of which only the ticket can be read: their rows say why, and offer to release them.
const damagedHolders = (snapshot) =>
  snapshot.damaged.filter(({ kind }) => kind === "holder").map(({ name, reason, until_ms }) =>
    ({ ticket: name, owner: reason, metadata: {}, weight: null, fence: null, expires_at_ms: until_ms }));

function drawHolders(snapshot, now) {
  const holders = [...snapshot.holders, ...damagedHolders(snapshot)];
  keyed(byId("holders"), holders, ticketKey, () => createRow(4), (row, permit) => {
    const left = permit.expires_at_ms - now;
    const cells = [
      ["fence", String(permit.fence ?? "?")],
      ["held for", permit.fence === null ? "?" : span(now - permit.granted_at_ms)],
      ["lease left", left > 0 ? span(left) : "ended"],
    ];
    updateRow(row, permit, [["units", permit.weight === null ? "?" : units(permit.weight)], ...cells]);
    offerRelease(row, "Release", snapshot.resource, permit.ticket, "Its process loses the permit at once. It may still be writing.");
  });
  const more = snapshot.holders.length === 100 ? "The first 100 are listed." : "";
  setText(byId("holders-note"), holders.length ? more : "Nobody holds it.");
}

function drawWaiters(snapshot, now) {
  const inOrder = snapshot.waiters.map((waiter, index) => ({ ...waiter, place: index + 1 }));
  keyed(byId("waiters"), inOrder, ticketKey, () => createRow(3), (row, waiter) => {
    const cells = [["place", String(waiter.place)], ["waits for", span(now - waiter.queued_at_ms)]];
    updateRow(row, waiter, [["units", units(waiter.weight)], ...cells]);
    offerRelease(row, "Take out", snapshot.resource, waiter.ticket, "Its process stops waiting, with an error.");
  });
  const more = snapshot.waiting - snapshot.waiters.length;
  setText(byId("waiters-note"), more > 0 ? `And ${more.toLocaleString("en")} more.` : snapshot.waiting ? "" : "Nobody waits.");
}

const ticketKey = (each) => `${each.ticket} ${each.fence ?? "waits"}`;

// A row: owner, ticket and metadata, so many numbers, and the button.
function createRow(numbers) {
  const who = make("th", "", ...whoParts(), make("ul", "metadata"));
  who.scope = "row";
  const cells = Array.from({ length: numbers }, () => make("td", "number"));
  return make("tr", "", who, ...cells, make("td", "act"));
}

function updateRow(row, each, numbers) {
  const [who, ...cells] = row.children;
  updateWho(who, each);
  keyed(who.lastElementChild, Object.entries(each.metadata), ([key]) => key, () => make("li"), (node, [key, value]) =>
    setText(node, `${plain(key)}=${plain(value)}`));
  numbers.forEach(([label, text], index) => {
    cells[index].dataset.label = label;
    setText(cells[index], text);
  });
}

function offerRelease(row, verb, resource, ticket, consequence) {
  const cell = row.lastElementChild;
  if (changes === null || cell.firstElementChild) return;
  const button = make("button", "", verb);
  button.type = "button";
  button.setAttribute("aria-label", `${verb} ${plain(ticket)}`);
  button.onclick = () => changes.release(resource, ticket, verb, consequence);
  cell.append(button);
}
