// Texts and times for people.

export const UNLIMITED = 2 ** 31 - 1; // what a writer of a read-write lock holds, and the capacity of such a lock
const COLOURS = 8;

// Returns the text with unprintable characters escaped, among them those that change the direction of what follows.
export function plain(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]|[^\S ]/gu, (char) => {
    const named = { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[char];
    if (named) return named;
    const code = char.codePointAt(0).toString(16);
    if (code.length <= 2) return `\\x${code.padStart(2, "0")}`;
    return code.length <= 4 ? `\\u${code.padStart(4, "0")}` : `\\U${code.padStart(8, "0")}`;
  });
}

// Returns a time in at most two units: `0.4 s`, `12 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`.
export function span(ms) {
  const seconds = Math.floor(Math.max(0, ms) / 1000);
  if (seconds < 10) return `${(Math.floor(Math.max(0, ms) / 100) / 10).toFixed(1)} s`;
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export const units = (weight) => (weight === UNLIMITED ? "all" : weight.toLocaleString("en"));

export const counted = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// Returns the class of an owner's colour, the same wherever it is shown.
export function colourOf(owner) {
  let hash = 2166136261;
  for (let index = 0; index < owner.length; index += 1) {
    hash = Math.imul(hash ^ owner.charCodeAt(index), 16777619);
  }
  return `c${(hash >>> 0) % COLOURS}`;
}
