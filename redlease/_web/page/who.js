// An owner and its ticket, as tables name them.

import { make, setText } from "./dom.js";
import { colourOf, plain } from "./words.js";

export const whoParts = () => [make("span", "dot"), make("span", "owner"), make("span", "ticket")];

export function updateWho(cell, { owner, ticket }) {
  const [dot, name, id] = cell.children;
  dot.className = `dot ${colourOf(owner)}`;
  setText(name, plain(owner));
  setText(id, plain(ticket));
}
