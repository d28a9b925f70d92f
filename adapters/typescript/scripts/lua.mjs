// Writes src/lua.ts from the scripts of the Python package, which are the protocol: no second copy of them is kept.
// The names of the arguments come from the contract at the head of each script.
import {readFileSync, readdirSync, writeFileSync} from "node:fs";
import {createHash} from "node:crypto";
import {fileURLToPath} from "node:url";

const here = fileURLToPath(new URL("../", import.meta.url));
const python = process.env.REDLEASE_PYTHON ?? `${here}../../redlease`; // where the Python package is
const read = (path) => readFileSync(`${python}/_core/${path}.lua`, "utf8");

// As protocol/scripts.py does it, so that the server keeps one copy of each script.
const stripped = (text) => text.split("\n").map((line) => line.trim()).filter((line) => line && (!line.startsWith("--") || line.startsWith("--#"))).join("\n") + "\n";

// Fields of the header, and their positions in the reply, in place of their names; a file that does not read the header has it from state.lua.
const FIELDS = new Map([...read("lua/header").matchAll(/^  (\w+) = (.+?),/gm)].map(([, name, field]) => [name, field]));
function withPositions(lua) {
  const [reading, names] = /read_header\(([^)]+)\)/.exec(lua + read("lua/parts/state"));
  const layout = names.match(/\w+/g);
  const known = (name, of) => {
    if (!of.includes(name)) throw new Error(`${name} is not one of ${of.join(", ")}`);
    return name;
  };
  const field = (name) => FIELDS.get(known(name, [...FIELDS.keys()]));
  const position = (was, name) => (field(name) === "NOTE" ? was : `was[${layout.indexOf(known(name, layout)) + 1}]`);
  lua = lua.replaceAll(reading, `call('HMGET', state, ${layout.map(field).join(", ")})`);
  return lua.replaceAll("HEADER_SIZE", layout.length).replace(/was\.(\w+)/g, position);
}
const sent = (path) => withPositions(stripped(read(path)));

const PARTS = {queue: ["grants", "queue", "turns"]}; // a line that includes another part stands for its file
function included(text) {
  const seen = new Set(); // a file that is included a second time stands where it was first
  const once = (file) => (seen.has(file) ? "" : (seen.add(file), sent(`lua/parts/${file}`)));
  return text.replace(/--#include (\w+)\n/g, (_, part) => (PARTS[part] ?? [part]).map(once).join(""));
}

function operation(path) {
  const text = included(sent("lua/parts/prelude") + sent(path));
  const args = /^-- ARGV: (.*)$/m.exec(read(path))[1].split(" ").filter((name) => name !== "tag");
  return {sha: createHash("sha1").update(text).digest("hex"), args, text};
}

const named = (folder) => readdirSync(`${python}/_core/${folder}`).filter((file) => file.endsWith(".lua") && !["header.lua", "probe.lua"].includes(file));
const paths = ["lua", "lua/looks"].flatMap((folder) => named(folder).map((file) => `${folder}/${file.slice(0, -4)}`));
const scripts = Object.fromEntries(paths.map((path) => [path.split("/").at(-1), operation(path)]));
writeFileSync(`${here}src/lua.ts`, `// Written by scripts/lua.mjs.\nexport const LUA = ${JSON.stringify(scripts, null, 1)} as const;\n`);
