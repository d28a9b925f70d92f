// Writes src/lua.ts from the scripts of the Python package, which are the protocol: no second copy of them is kept.
// The names of the arguments come from the contract at the head of each script.
import {readFileSync, readdirSync, writeFileSync} from "node:fs";
import {createHash} from "node:crypto";
import {fileURLToPath} from "node:url";

const here = fileURLToPath(new URL("../", import.meta.url));
const python = process.env.REDLEASE_PYTHON ?? `${here}../../redlease`; // where the Python package is
const read = (path) => readFileSync(`${python}/_core/${path}.lua`, "utf8");

const PARTS = {queue: ["grants", "queue", "turns"]}; // a line that includes another part stands for its file
function included(text) {
  const seen = new Set(); // a file that is included a second time stands where it was first
  const once = (file) => (seen.has(file) ? "" : (seen.add(file), read(`lua/parts/${file}`)));
  return text.replace(/--#include (\w+)\n/g, (_, part) => (PARTS[part] ?? [part]).map(once).join(""));
}

// As protocol/scripts.py does it, so that the server keeps one copy of each script.
const stripped = (text) => text.split("\n").map((line) => line.trim()).filter((line) => line && !line.startsWith("--")).join("\n") + "\n";

function operation(path) {
  const own = read(path);
  const text = stripped(included(read("lua/parts/prelude") + own));
  const args = /^-- ARGV: (.*)$/m.exec(own)[1].split(" ").filter((name) => name !== "tag");
  return {sha: createHash("sha1").update(text).digest("hex"), args, text};
}

const named = (folder) => readdirSync(`${python}/_core/${folder}`).filter((file) => file.endsWith(".lua") && file !== "probe.lua");
const paths = ["lua", "lua/looks"].flatMap((folder) => named(folder).map((file) => `${folder}/${file.slice(0, -4)}`));
const scripts = Object.fromEntries(paths.map((path) => [path.split("/").at(-1), operation(path)]));
writeFileSync(`${here}src/lua.ts`, `// Written by scripts/lua.mjs.\nexport const LUA = ${JSON.stringify(scripts, null, 1)} as const;\n`);
