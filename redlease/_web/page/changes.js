// Releases tickets and sets capacities, after a question.

import { byId, setText } from "./dom.js";
import { plain, units } from "./words.js";

const KEPT = "redlease-token";

// The address may carry the token in its fragment, which browsers do not send; it does not stay there to be copied.
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given === null) return;
  sessionStorage.setItem(KEPT, given);
  history.replaceState(history.state, "", location.pathname + location.search);
}

export async function release(resource, ticket, verb, consequence) {
  const question = { title: `${verb} ${plain(ticket)} of ${plain(resource)}?`, consequence, verb };
  if (!(await agreed(question))) return;
  await send("release", { resource, ticket }, ({ released }) =>
    released ? `${plain(ticket)} is taken out of ${plain(resource)}.` : `${plain(resource)} has no ${plain(ticket)} any more.`);
}

export async function resize(snapshot) {
  const question = {
    title: `Change the capacity of ${plain(snapshot.resource)}?`,
    consequence: "For all processes, until one declares another capacity. Permits that are held stay.",
    verb: "Change",
    capacity: snapshot.capacity,
  };
  if (!(await agreed(question))) return;
  const capacity = byId("capacity").valueAsNumber;
  await send("resize", { resource: snapshot.resource, capacity }, () =>
    `The capacity of ${plain(snapshot.resource)} is ${units(capacity)} now.`);
}

// Asks, and returns whether the answer was yes.
function agreed({ title, consequence, verb, capacity }) {
  const dialog = byId("ask");
  setText(byId("question"), title);
  setText(byId("consequence"), consequence);
  setText(byId("confirm"), verb);
  const resizes = capacity !== undefined;
  byId("capacity-field").hidden = !resizes;
  byId("capacity").required = resizes;
  byId("capacity").value = capacity ?? "";
  const known = sessionStorage.getItem(KEPT) !== null;
  byId("token-field").hidden = known;
  byId("token").required = !known;
  byId("token").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  byId("cancel").onclick = () => dialog.close("");
  byId("answer").onsubmit = (event) => {
    event.preventDefault();
    if (!known) sessionStorage.setItem(KEPT, byId("token").value);
    dialog.close("yes");
  };
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
  });
}

async function send(what, order, told) {
  const headers = { "Content-Type": "application/json", "X-Redlease-Token": sessionStorage.getItem(KEPT) };
  try {
    const reply = await fetch(what, { method: "POST", headers, body: JSON.stringify(order) });
    const result = await reply.json();
    if (reply.status === 401) sessionStorage.removeItem(KEPT);
    tell(reply.ok ? told(result) : `Not done: ${plain(result.error)}.`, reply.ok);
  } catch {
    tell("Not done, or not known to be: redlease web did not answer.", false);
  }
}

let hiding = 0;

function tell(text, done) {
  const note = byId("told");
  note.dataset.done = done;
  setText(note, text);
  clearTimeout(hiding);
  hiding = setTimeout(() => setText(note, ""), 10000);
}
