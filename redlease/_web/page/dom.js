// Builds and updates elements. What comes from the server is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// Returns an element with a class and with children, which are nodes or texts.
export function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  setAll(node, attributes);
  node.append(...children);
  return node;
}

export function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

// Writes only what differs, so that a selection of text survives and nothing is laid out again without need.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes the children of `parent` be those for `items`, in their order, and keeps the element of a key that stays.
export function keyed(parent, items, keyOf, create, update) {
  parent.keyed ??= new Map();
  const before = parent.keyed;
  const after = new Map();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (after.has(key)) continue;
    const node = before.get(key) ?? create(item);
    after.set(key, node);
    update(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const [key, node] of before) if (!after.has(key)) node.remove();
  parent.keyed = after;
}
