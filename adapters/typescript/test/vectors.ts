// Plays the golden vectors: sends their calls with this client's encoder, and reads what comes with its decoder.
// Arguments: the server's URL, and the file of vectors. The scripts take the time of each call as two more arguments.
import assert from "node:assert/strict";
import {readFileSync} from "node:fs";
import {Redis} from "ioredis";
import {LUA} from "../src/lua.js";
import {
  acquireValues, BEAT, keysOf, readAcquired, readBeaten, Reading, readMessage, STATUSES, words, type Operation, type Raw,
} from "../src/protocol.js";

type Json = string | number | Json[];
interface Call {at_us: number; call: Operation; args: (string | number)[]; reply: Json[]; messages: [string, string][]}
interface Scenario {name: string; calls: Call[]; keys: Record<string, {expires_at_ms: number; contains: Record<string, string | number>}>}

const LATER_MS = 10 ** 13; // keys expire so much later on the server than they say, or it would delete them by its own clock
const KEYS = keysOf("model", "r");
const REPLACED: [string, string][] = [
  ["local call, format = redis.call, string.format\n", `
local format = string.format
local function call(...)
  local words = {...}
  if words[1] == 'PEXPIREAT' then words[3] = format('%d', words[3] + ${LATER_MS}) end
  return redis.call(unpack(words))
end
`],
  ["local clock = call('TIME')\n", `
local micros = table.remove(ARGV)
local clock = {table.remove(ARGV), micros}
for _, key in ipairs(KEYS) do
  local ends = call('PEXPIRETIME', key)
  if ends > 0 and ends - ${LATER_MS} < clock[1] * 1000 + clock[2] / 1000 then call('DEL', key) end
end
`],
];

/** Returns a script that takes the time, and publishes on ordinary channels only, as where the vectors were made. */
function atGivenTime(text: string): string {
  for (const [before, after] of REPLACED) {
    assert(text.includes(before), `the scripts no longer contain ${before}`);
    text = text.replace(before, after);
  }
  return text.replaceAll("redis.pcall('PEXPIREAT'", "call('PEXPIREAT'").replaceAll("'SPUBLISH'", "'NO SUCH COMMAND'");
}

/** Returns a reply as the vectors have it: a byte that is no UTF-8 stands as the character of its number. */
function written(raw: Raw): Json {
  if (Array.isArray(raw)) return raw.map(written);
  if (typeof raw === "number") return raw;
  return Buffer.from(raw.toString()).equals(raw) ? raw.toString() : raw.toString("latin1");
}

const [url, file] = process.argv.slice(2) as [string, string];
const redis = new Redis(url);
const listening = new Redis(url);
const heard: [string, string][] = [];
let onMarker = () => {};
listening.on("pmessage", (_pattern, channel: string, payload: string) => {
  if (channel === "marker") onMarker();
  else heard.push([channel, payload]);
});
await listening.psubscribe("*");

/** Returns the messages since the last time: what was published before a marker comes before it. */
async function messages(): Promise<[string, string][]> {
  const marked = new Promise<void>((resolve) => (onMarker = resolve));
  await redis.publish("marker", "");
  await marked;
  return heard.splice(0);
}

/** Encodes a call as the client does; an acquire that it would not write so, such as one with a history or a key, is sent as it is. */
function encoded({call, args}: Call): (string | Buffer)[] {
  assert(args.length <= LUA[call].args.length, "the vector has the arguments of the script");
  const values: any = Object.fromEntries(LUA[call].args.map((name, index) => [name, args[index]]));
  const terms = /^(\d+)(?: (?!0 $)(\d+) (\d*))?$/.exec(String(values.weight));
  if (call === "acquire" && terms && values.key === undefined) {
    const [owner, metadata] = JSON.parse(values.label);
    const times = {leaseMs: values.lease_ms, waiterLeaseMs: values.waiter_lease_ms, idleTtlMs: values.idle_ttl_ms};
    const settings = {priority: Number(terms[2] ?? 0), lockDelayMs: terms[3] ? Number(terms[3]) : undefined, queue: values.waiter_lease_ms > 0};
    const ask = {
      ...times, ...settings, resource: "r", keys: KEYS, ticket: values.ticket, weight: Number(terms[1]), capacity: values.capacity,
      maxWaiters: values.max_waiters, owner, metadata, renewed: true,
    };
    return words(call, KEYS, "tag", acquireValues(ask, values.request, values.place, values.arrival)).slice(1);
  }
  return words(call, KEYS, "tag", values).slice(1);
}

/** Returns a reply that was decoded, written again from what the decoder made of it. */
function decoded({call, reply: expected}: Call, reply: Raw[]): unknown {
  if (call === "acquire" || call === "beat") {
    const read: any = call === "acquire" ? readAcquired(reply) : readBeaten(reply);
    const status = STATUSES.findIndex(([name]) => name === read.status);
    const names: readonly string[] = call === "beat" && read.status === "queued" ? BEAT : STATUSES[status]!;
    return [status + 1, ...names.slice(1).map((name) => read[name])].filter((value) => value !== undefined);
  }
  if (call !== "inspect") return written(reply);
  const reading = new Reading("r", 1, 1000);
  reading.add(reply);
  const {capacity, fence, holders, in_use, server_time_ms, waiters, waiting} = reading.snapshot;
  assert.deepEqual([server_time_ms, fence, capacity, in_use, waiting], expected.slice(0, 5).map((value, index) => (index === 2 ? value || 1 : value)));
  const [held, queued] = expected.slice(5) as [Json[], Json[]];
  for (const {ticket, expires_at_ms, weight, fence, lease_ms, granted_at_ms} of holders) {
    const at = held.indexOf(ticket);
    assert.equal(held[at + 1], expires_at_ms);
    assert.equal(String(held[at + 2]).replace(/^0/, "").replace(/ 0(\d)/, " $1").split(" ", 4).join(" "), [weight, fence, lease_ms, granted_at_ms].join(" "));
  }
  assert.equal(holders.length, held.filter((each, index) => index % 3 === 0 && !String(each).startsWith("\xff")).length);
  assert.deepEqual(waiters.map(({ticket}) => ticket), queued.filter((_, index) => index % 2 === 0));
  return expected;
}

async function stored(nowMs: number) {
  const found: Scenario["keys"] = {};
  for (const key of KEYS) {
    const part = key.split(":").at(-1)!;
    const line = part === "state" ? ["HGETALL", key] : ["ZRANGE", key, "0", "-1", "WITHSCORES"];
    const flat = ((await redis.callBuffer(line[0]!, line.slice(1))) as Buffer[]).map((each) => each.toString("latin1"));
    const names = flat.filter((_, index) => index % 2 === 0);
    const pairs = names.map((name, index) => [name, part === "state" ? flat[2 * index + 1] : Number(flat[2 * index + 1])]);
    const ends = Number(await redis.pexpiretime(key)) - LATER_MS;
    if (pairs.length && ends >= nowMs) found[part] = {expires_at_ms: ends, contains: Object.fromEntries(pairs)};
  }
  return found;
}

const shas = new Map<string, string>();
for (const [name, {text}] of Object.entries(LUA)) {
  shas.set(name, String(await redis.script("LOAD", atGivenTime(text))));
}
let calls = 0;
for (const scenario of JSON.parse(readFileSync(file, "utf8")) as Scenario[]) {
  await redis.del(...KEYS, KEYS[0]!.replace("state", "history"));
  for (const vector of scenario.calls) {
    const time = [Math.floor(vector.at_us / 1e6), vector.at_us % 1e6].map(String);
    const raw = (await redis.callBuffer("EVALSHA", [shas.get(vector.call)!, ...encoded(vector), ...time])) as Raw[];
    const where = `${scenario.name}, call ${scenario.calls.indexOf(vector)}: ${vector.call} ${vector.args}`;
    assert.equal(String(raw[0]), "tag", where);
    assert.deepEqual(written(raw.slice(1)), vector.reply, where);
    assert.deepEqual(decoded(vector, raw.slice(1)), vector.reply, where);
    const told = await messages();
    assert.deepEqual(told, vector.messages, where);
    for (const [, payload] of told.filter(([, payload]) => payload)) {
      const {kind, about, numbers, by} = readMessage(payload)!;
      const parts = kind === "c" ? [kind, ...numbers, about] : [kind, about, ...numbers, ...(by ? [by] : [])];
      assert.equal(parts.join(" "), payload, where);
    }
    calls++;
  }
  assert.deepEqual(await stored(Math.floor(scenario.calls.at(-1)!.at_us / 1000)), scenario.keys, scenario.name);
}
console.log(JSON.stringify({event: "played", calls}));
redis.disconnect();
listening.disconnect();
