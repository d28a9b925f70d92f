// Connects the page to the stream of events, and the address to the chosen resource.

import * as changes from "./changes.js";
import { byId, setText } from "./dom.js";
import { drawList, markChosen, showOverview } from "./list.js";
import { allowChanges, drawResource, openResource, showDetail, showHistory } from "./resource.js";
import { plain, span } from "./words.js";

const SILENT_MS = 15000; // the server sends something every 5 s
const AGAIN_MS = 3000;

let stream = null;
let heardAt = performance.now();
let outage = null; // why what is shown is not the present, and since when

const chosenName = () => new URLSearchParams(location.search).get("resource");

function listen() {
  stream?.close();
  const name = chosenName();
  stream = new EventSource(name === null ? "events" : `events?resource=${encodeURIComponent(name)}`);
  on("overview", showOverview);
  on("history", showHistory);
  on("detail", showDetail);
  on("status", ({ reachable, why }) => (reachable ? recovered() : lost(`The Redis server is out of reach: ${plain(why)}`)));
  on("beat", () => {});
  stream.onerror = onError;
}

function on(kind, show) {
  const from = stream;
  from.addEventListener(kind, (event) => {
    if (from !== stream) return;
    heardAt = performance.now();
    show(JSON.parse(event.data));
  });
}

function onError() {
  lost("The page has lost its connection to redlease web.");
  // A browser connects again by itself, unless the answer was an error.
  if (stream.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN_MS);
}

function lost(why) {
  if (outage?.why === why) return;
  outage = { why, since: outage?.since ?? performance.now() };
  document.body.classList.add("stale");
  byId("state").dataset.state = "lost";
  setText(byId("state"), "out of reach");
  setText(byId("outage"), `${why} What is shown is old.`);
  byId("outage").hidden = false;
}

function recovered() {
  outage = null;
  document.body.classList.remove("stale");
  byId("state").dataset.state = "live";
  setText(byId("state"), "live");
  byId("outage").hidden = true;
}

// Waits and holds grow between events, unless nobody knows whether they still last.
function tick() {
  if (performance.now() - heardAt > SILENT_MS) lost("The page has heard nothing from redlease web for a while.");
  if (outage !== null) {
    byId("state").title = `for ${span(performance.now() - outage.since)}`;
    return;
  }
  if (document.hidden) return;
  drawList();
  drawResource();
}

function open() {
  const name = chosenName();
  document.title = name === null ? "redlease" : `${plain(name)} · redlease`;
  document.body.classList.toggle("one", name !== null);
  markChosen(name);
  openResource(name);
  listen();
}

// A link to a resource changes what is shown, not the page.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || link.origin !== location.origin || link.hash || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  if (link.href === location.href) return;
  history.pushState(null, "", link.href);
  open();
  if (chosenName() !== null) byId("detail").focus({ preventScroll: false });
});
window.addEventListener("popstate", open);
byId("filter").addEventListener("input", () => drawList());
byId("order").addEventListener("change", () => drawList());
byId("range").addEventListener("change", () => drawResource());

changes.takeToken();
open();
setInterval(tick, 500);
const facts = await (await fetch("facts")).json();
const which = facts.pattern === "*" ? "" : `, names that match ${plain(facts.pattern)}`;
setText(byId("where"), `${plain(facts.server)}, prefix ${plain(facts.prefix)}${which}`);
if (facts.changes) allowChanges(changes);
