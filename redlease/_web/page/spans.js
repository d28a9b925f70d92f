// Turns a history, and what is held and waited for now, into spans of time.

// A span: `from` is when it was granted, null if it only waited; `waited` when it was queued, null if it was not;
// `to` null while it lasts; `end` how it ended.
export function spansOf(snapshot, history, now) {
  const spans = [];
  const open = new Map();
  const begin = (ticket, owner, fence, weight, from, waited) => {
    const span = { key: `${ticket} ${fence}`, ticket, owner, fence, from, waited, to: null, end: null, weights: [[from, weight]] };
    spans.push(span);
    open.set(ticket, span);
    return span;
  };
  for (const entry of history) apply(entry, open, begin, spans);
  for (const permit of snapshot.holders) {
    if (open.get(permit.ticket)?.fence === permit.fence) continue;
    begin(permit.ticket, permit.owner, permit.fence, permit.weight, permit.granted_at_ms, null);
  }
  const held = new Set(snapshot.holders.map((permit) => permit.ticket));
  for (const span of open.values()) {
    // Its lease has ended, and no call has come since to write that down; or it was granted after the snapshot.
    if (!held.has(span.ticket) && span.from <= snapshot.server_time_ms && snapshot.holders.length < 100) {
      Object.assign(span, { to: snapshot.server_time_ms, end: "lost" });
    }
  }
  for (const waiter of snapshot.waiters) {
    const span = { ticket: waiter.ticket, owner: waiter.owner, fence: 0, from: null, waited: waiter.queued_at_ms };
    spans.push({ ...span, key: `${waiter.ticket} waits`, to: null, end: null, weights: [] });
  }
  return spans.filter((span) => (span.to ?? now) >= (span.waited ?? span.from));
}

const OF_THE_RESOURCE = new Set(["resized", "limited", "lifted"]);

function apply(entry, open, begin, spans) {
  if (OF_THE_RESOURCE.has(entry.event)) return;
  const { event, ticket, owner, fence, weight, at_ms: at, waited_ms: waited, held_ms: held } = entry;
  const before = open.get(ticket);
  if (event === "granted") {
    begin(ticket, owner, fence, weight, at, waited ? at - waited : null);
  } else if (event === "adopted") {
    if (before) Object.assign(before, { to: at, end: "adopted" });
    begin(ticket, owner, fence, weight, at, null);
  } else if (event === "reduced") {
    before?.weights.push([at, weight]);
  } else if (event === "superseded" && fence !== 0) {
    return; // it is held until it is released or lost
  } else if (fence === 0) {
    const span = { key: `${ticket} ${entry.id}`, ticket, owner, fence, from: null, waited: at - (waited ?? 0) };
    spans.push({ ...span, to: at, end: event, weights: [] });
  } else if (before?.fence === fence || held !== null) {
    const span = before?.fence === fence ? before : begin(ticket, owner, fence, weight, at - held, null);
    Object.assign(span, { to: event === "lost" && held !== null ? Math.min(at, span.from + held) : at, end: event });
    open.delete(ticket);
  }
}

// Places spans on lanes, those of an owner side by side, so that none covers another.
export function lanesOf(spans, most) {
  const owners = new Map();
  for (const span of spans.toSorted((a, b) => begins(a) - begins(b))) {
    const lanes = owners.get(span.owner) ?? [];
    owners.set(span.owner, lanes);
    const lane = lanes.find((each) => (each.at(-1).to ?? Infinity) <= begins(span));
    if (lane) lane.push(span);
    else lanes.push([span]);
  }
  const named = [...owners].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const all = named.flatMap(([owner, lanes]) => lanes.map((lane, index) => ({ key: `${owner} ${index}`, owner, index, lane })));
  return { lanes: all.slice(0, most), left: all.length - Math.min(all.length, most) };
}

export const begins = (span) => span.waited ?? span.from;

// Returns the units in use as steps, [time, units].
export function usage(spans, now) {
  const changes = [];
  for (const { from, to, weights } of spans) {
    if (from === null) continue;
    let before = 0;
    for (const [at, weight] of weights) {
      changes.push([at, weight - before]);
      before = weight;
    }
    changes.push([to ?? now, -before]);
  }
  changes.sort(([a, first], [b, second]) => a - b || first - second);
  let used = 0;
  return changes.map(([at, change]) => [at, (used += change)]);
}
