/** The wire format of docs/protocol.md, without I/O: keys, arguments, replies and messages. */
import {LUA} from "./lua.js";

export type Operation = keyof typeof LUA;
type Value = string | number | Buffer;
/** The arguments of a call, by the names in the contract of its script; a key is left out if there is none. */
export type Values<Name extends Operation> = Record<Exclude<(typeof LUA)[Name]["args"][number], "key">, Value> & {key?: Value};
/** What ioredis gives for a reply: text is a Buffer, since names of lock delays are no UTF-8. */
export type Raw = number | Buffer | Raw[];

const FENCE_MAX = 2 ** 53 - 1, COUNT_MAX = 2 ** 31 - 1, DURATION_MS_MAX = 366 * 24 * 3600 * 1000;
const PAGE_BYTES = 500_000; // about the size of one reply of `inspect`
const CHECKED_MOST = 5000; // waiters that one call checks, to count the live ones

/** Who asks, as all see it. The names are those of Python's data: a permit or a snapshot as JSON is the same in both. */
interface Asked {ticket: string; weight: number; owner: string; metadata: Record<string, string>}

/** A permit as data. Times are ms of the server's clock. */
export interface Permit extends Asked {
  resource: string; fence: number; capacity: number; lease_ms: number; granted_at_ms: number; expires_at_ms: number;
}

export interface Waiter extends Asked {queued_at_ms: number}

/** A holder or waiter that cannot be read, since a part of the state was deleted or overwritten; `name` is its ticket. */
export interface DamagedEntry {kind: "holder" | "waiter"; name: string; reason: string; until_ms: number | null}

/** Who holds a resource and who waits for it; `fence` is the last one granted, `in_use` and `waiting` are totals. */
export interface Snapshot extends Pick<Permit, "resource" | "capacity" | "fence"> {
  holders: Permit[]; waiters: Waiter[]; damaged: DamagedEntry[]; server_time_ms: number; in_use: number; waiting: number;
}

/** Checks a whole number; a `RangeError` says what is wrong with it. */
export function count(what: string, value: number, low = 1, high = COUNT_MAX): number {
  if (Number.isInteger(value) && value >= low && value <= high) return value;
  throw new RangeError(`${what} must be a whole number from ${low} to ${high}, not ${value}`);
}

/** Checks a duration in ms. */
export const duration = (what: string, ms: number, low = 10) => count(what, Math.ceil(ms), low, DURATION_MS_MAX);

/** Checks a text by its length in UTF-8. */
export function text(what: string, value: string, most: number): string {
  if (typeof value === "string" && value && !/\p{Surrogate}/u.test(value) && Buffer.byteLength(value) <= most) return value;
  throw new RangeError(`the ${what} must be a string of 1 to ${most} bytes of UTF-8, not ${JSON.stringify(value)}`);
}

/** Checks the prefix of keys and channels. */
export function prefix(value: string): string {
  if (!/^[:!]|[\s{}|\x00-\x1f\x7f]/.test(text("prefix", value, 128))) return value;
  throw new RangeError(`the prefix must have no spaces, braces or bars, nor begin with : or !, not ${JSON.stringify(value)}`);
}

/** Checks where a server is: ioredis takes what is no URL for a path. */
export function url(value: string): string {
  if (/^(rediss?:\/)?\//.test(value)) return value;
  throw new RangeError(`the URL must begin with redis:// or rediss://, or be the path of a socket, not ${JSON.stringify(value)}`);
}

/** Returns the keys of a resource, in the order in which every call declares them; the first is that of its state. */
export function keysOf(prefix: string, name: string): string[] {
  const escaped = text("resource name", name, 512).replace(/[%{}]/g, (each) => ({"%": "%25", "{": "%7B", "}": "%7D"})[each]!);
  return ["state", "holders", "queue", "waiters"].map((part) => `${prefix}:{${escaped}}:${part}`);
}

/** Returns the words of a call, after its command. */
export function words<Name extends Operation>(name: Name, keys: string[], tag: string, values: Values<Name>): (string | Buffer)[] {
  const args = LUA[name].args.map((each) => values[each as keyof Values<Name>] as Value | undefined).filter((each) => each !== undefined);
  return [LUA[name].sha, String(keys.length), ...keys, tag, ...args.map((each) => (typeof each === "number" ? String(each) : each))];
}

/** How a resource is held and waited for. All clients of a resource declare the same capacity. */
export interface Terms {
  /** How long a permit stays valid without renewal; 30 s. */
  leaseMs?: number;
  /** How long a place in the queue stays valid without a heartbeat; 10 s. */
  waiterLeaseMs?: number;
  /** How long the state of an idle resource is kept; a day. */
  idleTtlMs?: number;
  /** How many may wait; unlimited. */
  maxWaiters?: number;
  /** How long the units of an expired permit stay in use after its lease. */
  lockDelayMs?: number | undefined;
  /** Who is shown as holder; host and process id. */
  owner?: string;
}

/** The checked terms of one request. `queue`: it may wait; `renewed`: a hold renews it, if not a grant must have a full lease. */
export type Ask = Required<Terms> & Pick<Permit, "resource" | "ticket" | "weight" | "capacity" | "metadata"> &
  {keys: string[]; priority: number; queue: boolean; renewed: boolean};

/** Returns the arguments of an acquire; `arrival` is "+0" for a request that was queued before. */
export function acquireValues(ask: Ask, request: string, place: string, arrival: string | number): Values<"acquire"> {
  const {ticket, weight, priority, lockDelayMs, leaseMs, capacity, waiterLeaseMs, maxWaiters, idleTtlMs, owner, metadata, queue} = ask;
  const settings = priority || lockDelayMs !== undefined ? ` ${priority} ${lockDelayMs ?? ""}` : "";
  const terms = {lease_ms: leaseMs, capacity, waiter_lease_ms: queue ? waiterLeaseMs : 0, max_waiters: maxWaiters, idle_ttl_ms: idleTtlMs};
  return {ticket, request, place, arrival, weight: `${weight}${settings}`, ...terms, label: JSON.stringify([owner, metadata])};
}

/** The statuses of `acquire` and `beat`, with the values that follow each of `acquire`'s. */
export const STATUSES = [
  ["granted", "fence", "grantedAtMs", "deadlineMs", "capacity", "wasDeclared", "more"],
  ["queued", "sequence", "ahead", "soonestMs", "capacity", "wasDeclared", "more", "nowMs"],
  ["busy", "more"], ["full", "waiting", "next", "ofKey", "waitMs"], ["misfit", "capacity", "ofKey"], ["otherWeight", "weight", "ofKey"], ["withdrawn", "superseded"], ["lapsed"],
] as const;
export const BEAT = ["queued", "ahead", "soonestMs", "capacity", "more"] as const;
type Status = (typeof STATUSES)[number][0];
/** A reply of `acquire` or `beat`: of the numbers it has those of its status. */
export type Reply = {status: Status} & Record<Exclude<(typeof STATUSES)[number][number], Status>, number>;

function named(names: readonly string[] | undefined, values: Raw[]): Reply {
  if (!names || values.some((value) => typeof value !== "number")) throw new Error(`this is no reply of redlease: ${values}`);
  return Object.fromEntries(values.map((value, index) => (index ? [names[index], value] : ["status", names[0]]))) as Reply;
}

/** Reads a reply of `acquire`, without its tag. */
export const readAcquired = (reply: Raw[]) => named(STATUSES[Number(reply[0]) - 1], reply);

/** Reads a reply of `beat`, without its tag. */
export const readBeaten = (reply: Raw[]) => named(reply[0] === 2 ? BEAT : STATUSES[Number(reply[0]) - 1], reply);

/** Reads a record: weight, fence, lease, since, owner, metadata; throws an error if no script wrote it. */
export function readRecord(record: Buffer) {
  const [, weight, fence, lease, since, label] = /^(\d+) (\d+) (\d+) (\d+) \S+ \S+ (.*)$/s.exec(record.toString())!;
  const [owner, metadata] = JSON.parse(label!) as [string, Record<string, string>];
  if ([owner, ...Object.values(metadata)].some((word) => typeof word !== "string")) throw new TypeError("these are no words");
  return {weight: +weight!, fence: +fence!, leaseMs: +lease!, sinceMs: +since!, owner, metadata};
}

/** A snapshot being read: the arguments of the next call, and what the pages so far contain. */
export class Reading {
  #after: Value[] | undefined = ["", "", ""]; // bytes of the server's, which go back as they came
  #head = [0, 0, 0, 0, 0]; // the last two are added up over the pages
  readonly #holders = new Map<string, Permit>();
  readonly #waiters = new Map<string, Waiter>();
  readonly #damaged = new Map<string, DamagedEntry>();

  constructor(readonly resource: string, readonly declared: number, readonly limit: number) {}

  /** The arguments of the next call; undefined after the last page. */
  get values(): Values<"inspect"> | undefined {
    const most = [this.limit - this.#holders.size, this.limit - this.#waiters.size, PAGE_BYTES];
    const values = this.#after && [...most, ...this.#after, Math.max(0, CHECKED_MOST - this.#head[4]!)];
    return values && (Object.fromEntries(LUA.inspect.args.map((name, index) => [name, values[index]])) as unknown as Values<"inspect">);
  }

  /** Adds a reply of `inspect`, without its tag; a later page replaces what an earlier one said of a ticket. */
  add(reply: Raw[]): void {
    this.#head = (reply.slice(0, 5) as number[]).map((each, index) => (index < 3 ? each : this.#head[index]! + each));
    const [held, queued, after] = reply.slice(5) as [Raw[], Raw[], Buffer[]];
    for (let i = 0; i < held.length; i += 3) {
      const [ticket, deadline, record] = held.slice(i, i + 3) as [Buffer, number, Buffer];
      if (ticket[0] === 0xff) continue; // it stands for a lock delay
      this.#add("holder", this.#holders, ticket, record, deadline, ({weight, fence, leaseMs, sinceMs, owner, metadata}) => {
        const [resource, capacity, times] = [this.resource, this.#head[2]!, {granted_at_ms: sinceMs, expires_at_ms: deadline}];
        return {resource, ticket: `${ticket}`, fence, weight, capacity, lease_ms: leaseMs, ...times, owner, metadata};
      });
    }
    for (let i = 0; i < queued.length; i += 2) {
      const [ticket, record] = queued.slice(i, i + 2) as [Buffer, Buffer];
      this.#add("waiter", this.#waiters, ticket, record, null, ({weight, sinceMs, owner, metadata}) =>
        ({ticket: `${ticket}`, weight, owner, metadata, queued_at_ms: sinceMs}));
    }
    this.#after = after.length ? after : undefined;
  }

  #add<T>(kind: "holder" | "waiter", to: Map<string, T>, ticket: Buffer, record: Buffer, until_ms: number | null, entry: (read: ReturnType<typeof readRecord>) => T) {
    const [name, reason] = [`${ticket}`, record.length ? "its record is unreadable" : "its record is missing"];
    try {
      to.set(name, entry(readRecord(record)));
    } catch {
      this.#damaged.set(`${kind} ${name}`, {kind, name, reason, until_ms});
    }
  }

  get snapshot(): Snapshot {
    const [server_time_ms, fence, capacity, in_use, waiting] = this.#head as [number, number, number, number, number];
    const holders = [...this.#holders.values()].sort((one, other) => one.fence - other.fence);
    const waiters = [...this.#waiters.values()].filter((waiter) => !this.#holders.has(waiter.ticket));
    const damaged = [...this.#damaged.values()];
    return {resource: this.resource, capacity: capacity || this.declared, holders, waiters, damaged, fence, server_time_ms, in_use: Math.max(0, in_use), waiting};
  }
}

/** Returns the word in capitals that an error reply begins with, behind the wrapping of Redis 6.2, and none of the rest; or "". */
export const codeOf = (text: string) =>
  /^(?:(?:ERR )?Error running script \(call to \w+\): @user_script:\d+: )?(?:@user_script: \d+: )?-?([A-Z]+)(?= |$)/.exec(text)?.[1] ?? "";

/** A message: what it is about is a request or, for "c", the state key of a resource; for "s" it comes from a newer ticket. */
export interface Message {kind: string; about: string; numbers: number[]; by: string}

const NUMBERS: Record<string, number> = {g: 4, m: 1, x: 0, r: 0, c: 1, l: 1, s: 0};

/** Reads a message; undefined if no script can have written it. */
export function readMessage(payload: string): Message | undefined {
  const [kind = "", ...rest] = payload.split(" ");
  const about = kind === "c" ? rest.splice(1).join(" ") : rest.shift();
  const by = kind === "s" ? rest.splice(0).join(" ") : "";
  const numbers = rest.map((each) => (/^\d+$/.test(each) ? Number(each) : NaN));
  if (!about || numbers.length !== NUMBERS[kind] || !numbers.every((each) => each >= 0 && each <= FENCE_MAX)) return undefined;
  return {kind, about, numbers, by};
}
