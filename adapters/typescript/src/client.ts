/** The public face: a client, its semaphores and its guards. */
import {randomBytes} from "node:crypto";
import {hostname} from "node:os";
import type {Redis, RedisOptions} from "ioredis";
import {at, nowMs} from "./clock.js";
import {Connection} from "./connection.js";
import {AcquireTimeout, LeaseLost, StaleFence} from "./errors.js";
import {Hold} from "./hold.js";
import {count, duration, FENCE_MAX, guardKey, keysOf, prefix, Reading, text, type Ask, type Permit, type Snapshot} from "./protocol.js";
import {Session, timedOut, type Outcome, type Pending} from "./queue.js";

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
  lockDelayMs?: number;
  /** Who is shown as holder; host and process id. */
  owner?: string;
}

export interface Request {
  /** How long to wait, outages included; without limit. 0: not at all. */
  timeoutMs?: number;
  /** Ends the waiting: the call rejects with its reason at once, and the request is withdrawn in the background. */
  signal?: AbortSignal;
  /** The id of the request and of its permit; drawn. Whoever repeats it gets the same permit, or the same place. */
  ticket?: string;
  weight?: number;
  /** From 0 to 100: each step may pass up to ten earlier requests. */
  priority?: number;
  metadata?: Record<string, string>;
}

const CLOSE_WITHIN_MS = 5000;
const CALL_WITHIN_MS = 5000;
const TTL_MS = 86_400_000;

/** One client: two connections, however many of its tasks wait or hold. `close` it at the end. */
export class Redlease implements AsyncDisposable {
  readonly connection: Connection;
  readonly session: Session;
  readonly prefix: string;

  /** Takes a URL, options of ioredis, or a `Redis` of it, whose settings are used for connections of its own. */
  constructor(source: string | RedisOptions | Redis, options: {prefix?: string} = {}) {
    this.prefix = prefix(options.prefix ?? "redlease");
    this.connection = new Connection(source, this.prefix);
    this.session = new Session(this.connection);
  }

  /** Returns a semaphore of that capacity. Nothing is sent. */
  semaphore(name: string, options: Terms & {capacity: number}): Semaphore {
    return new Semaphore(this, name, options);
  }

  /** Returns a lock: a semaphore of capacity 1. */
  lock(name: string, options: Terms = {}): Semaphore {
    return this.semaphore(name, {...options, capacity: 1});
  }

  /** Returns what refuses the late writes of former holders; give it the name of the resource. */
  guard(name: string): Guard {
    return new Guard(this, name);
  }

  /** Releases what is held, withdraws what waits, and disconnects; takes 5 s at most. Permits of `acquire` stay held. */
  async close(): Promise<void> {
    await this.session.close(CLOSE_WITHIN_MS);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/** A resource that so many units of are held at once, in the order of arrival. */
export class Semaphore {
  readonly #terms: Omit<Ask, "ticket" | "weight" | "priority" | "metadata" | "queue" | "renewed">;

  constructor(readonly client: Redlease, readonly name: string, options: Terms & {capacity: number}) {
    this.#terms = {
      resource: name,
      keys: keysOf(client.prefix, name),
      capacity: count("capacity", options.capacity),
      leaseMs: duration("leaseMs", options.leaseMs ?? 30_000),
      waiterLeaseMs: duration("waiterLeaseMs", options.waiterLeaseMs ?? 10_000),
      idleTtlMs: duration("idleTtlMs", options.idleTtlMs ?? TTL_MS, 1),
      maxWaiters: options.maxWaiters === undefined ? -1 : count("maxWaiters", options.maxWaiters, 0),
      lockDelayMs: options.lockDelayMs === undefined ? undefined : duration("lockDelayMs", options.lockDelayMs, 0),
      owner: text("owner", options.owner ?? `${hostname()}:${process.pid}`, 256),
    };
  }

  /** Waits for a permit and keeps it renewed until it is released. */
  async hold(request: Request = {}): Promise<Hold> {
    const granted = await this.#obtain(request, true, request.timeoutMs !== 0);
    if (!granted) throw this.#busy();
    const [pending, outcome] = granted;
    const hold = new Hold(pending, this.#permitOf(pending, outcome), outcome);
    pending.leave(true);
    return hold;
  }

  /** Waits for a permit as data, which nobody renews: `renew` and `release` it. */
  async acquire(request: Request = {}): Promise<Permit> {
    const permit = await this.#acquire(request, request.timeoutMs !== 0);
    if (!permit) throw this.#busy();
    return permit;
  }

  /** Returns a permit as data if one is to be had without waiting; it passes nobody who waits. */
  tryAcquire(request: Omit<Request, "timeoutMs"> = {}): Promise<Permit | undefined> {
    return this.#acquire(request, false);
  }

  /** Gives a permit a full lease again; throws `LeaseLost` if it is no longer held. */
  async renew(permit: Permit): Promise<Permit> {
    const {ticket, fence, lease_ms} = permit;
    const values = {ticket, fence, lease_ms, shorten: 0, idle_ttl_ms: this.#terms.idleTtlMs};
    const {reply} = await this.client.connection.call("renew", this.#terms.keys, values, CALL_WITHIN_MS);
    const [deadline, capacity] = reply as [number, number];
    if (!deadline) throw new LeaseLost(`permit ${ticket} (fence ${fence}) is no longer held; acquire again`, this.name, ticket);
    return {...permit, expires_at_ms: deadline, capacity};
  }

  /** Gives a permit back, or takes whatever has that ticket out of the queue or from its holder; tells whether it was there. */
  async release(permit: Permit | string): Promise<boolean> {
    const isPermit = typeof permit !== "string";
    const what = isPermit ? {ticket: permit.ticket, fence: permit.fence, tombstone_ms: 0, notify: 0} :
      {ticket: text("ticket", permit, 256), fence: "", tombstone_ms: this.#terms.leaseMs, notify: 1};
    const values = {...what, request: "", idle_ttl_ms: this.#terms.idleTtlMs};
    const {reply} = await this.client.connection.call("release", this.#terms.keys, values, CALL_WITHIN_MS);
    if (reply[1]) this.client.session.followUp(this.#terms);
    return reply[0] === 1;
  }

  /** Tells whether the permit is held now under its fence. */
  async check({ticket, fence}: Permit): Promise<boolean> {
    return (await this.client.connection.call("check", this.#terms.keys, {ticket, fence}, CALL_WITHIN_MS)).reply[0] === 1;
  }

  /** Returns who holds and who waits, in order, at most `limit` of each. */
  async inspect(limit = 1000): Promise<Snapshot> {
    const reading = new Reading(this.name, this.#terms.capacity, count("limit", limit, 0));
    for (let values; (values = reading.values); ) {
      reading.add((await this.client.connection.call("inspect", this.#terms.keys, values, CALL_WITHIN_MS)).reply);
    }
    return reading.snapshot;
  }

  async #acquire(request: Request, queue: boolean): Promise<Permit | undefined> {
    const granted = await this.#obtain(request, false, queue);
    granted?.[0].leave(true);
    return granted && this.#permitOf(...granted);
  }

  #ask({ticket, weight = 1, priority = 0, metadata = {}}: Request, renewed: boolean, queue: boolean): Ask {
    const {clientId} = this.client.connection;
    count("weight", weight);
    count("priority", priority, 0, 100);
    const drawn = ticket === undefined ? `${clientId}-${randomBytes(6).toString("hex")}` : text("ticket", ticket, 256);
    if (!Object.values(metadata).every((each) => typeof each === "string")) throw new RangeError("metadata maps strings to strings");
    if (Buffer.byteLength(JSON.stringify(metadata)) > 8192) throw new RangeError("metadata may have 8192 bytes as JSON");
    return {...this.#terms, ticket: drawn, weight, priority, metadata, renewed, queue};
  }

  /** Returns a granted request, or undefined if it was not to wait and had to; any other ending leaves nothing behind. */
  async #obtain(request: Request, renewed: boolean, queue: boolean): Promise<[Pending, Outcome] | undefined> {
    const {timeoutMs, signal} = request;
    if (timeoutMs !== undefined) duration("timeoutMs", timeoutMs, 0);
    signal?.throwIfAborted();
    const pending = this.client.session.enter(this.#ask(request, renewed, queue));
    const abort = () => pending.fail(signal!.reason);
    signal?.addEventListener("abort", abort, {once: true});
    const late = () => pending.fail(timedOut(pending, timeoutMs!, this.client.connection));
    const timer = timeoutMs ? at(nowMs() + timeoutMs, late) : undefined;
    try {
      const outcome = await pending.done;
      signal?.throwIfAborted();
      if (outcome && nowMs() < outcome.untilMs) return [pending, outcome];
      pending.leave(false);
      return outcome && this.#obtain(request, renewed, queue); // the lease was over before this task went on
    } catch (error) {
      pending.leave(false);
      throw error;
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  #permitOf({ask}: Pending, {granted}: Outcome): Permit {
    const {resource, ticket, weight, leaseMs, owner, metadata} = ask;
    const {fence, capacity, grantedAtMs, deadlineMs} = granted;
    const times = {lease_ms: leaseMs, granted_at_ms: grantedAtMs, expires_at_ms: deadlineMs};
    return {resource, ticket, fence, weight, capacity, ...times, owner, metadata};
  }

  #busy(): AcquireTimeout {
    return new AcquireTimeout("no capacity is free and timeoutMs is 0; the request was not queued", this.name);
  }
}

/** The resource's side of fencing, in Redis: it remembers the highest fence, and refuses lower ones. */
export class Guard {
  readonly #key: string;

  constructor(readonly client: Redlease, readonly name: string) {
    this.#key = guardKey(client.prefix, name);
  }

  /** Takes note of a fence; throws `StaleFence` if it has seen a higher one. */
  async check(fence: number): Promise<void> {
    const values = {fence: count("fence", fence, 1, FENCE_MAX), idle_ttl_ms: TTL_MS};
    const {reply} = await this.client.connection.call("guard", [this.#key], values, CALL_WITHIN_MS);
    if (reply[0] !== 1) throw new StaleFence(`fence ${fence} is older than ${reply[1]}; nothing was written`, this.name);
  }
}

/**
 * Holds a permit while the body runs. If it is lost meanwhile, `hold.signal` aborts, and the result is a `LeaseLost`
 * once the body has ended; an error of the body is thrown as it is.
 */
export async function withPermit<Result>(
  pool: Semaphore, body: (hold: Hold) => Promise<Result>, request: Request = {},
): Promise<Result> {
  const hold = await pool.hold(request);
  try {
    const result = await body(hold);
    hold.check();
    return result;
  } finally {
    await hold.release();
  }
}
