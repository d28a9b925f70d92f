/** The public face: a client and its semaphores. */
import {randomBytes} from "node:crypto";
import {hostname} from "node:os";
import type {Redis, RedisOptions} from "ioredis";
import {nowMs, Timer} from "./clock.js";
import {ANSWER_WITHIN_MS, Connection} from "./connection.js";
import {AcquireTimeout, LeaseLost} from "./errors.js";
import {Hold} from "./hold.js";
import {count, duration, keysOf, prefix, Reading, text, type Ask, type Permit, type Snapshot, type Terms} from "./protocol.js";
import {Session, timedOut, type Outcome, type Pending} from "./queue.js";

export interface Request {
  /** How long to wait, outages included; without limit. 0: for nobody else, and 5 s for a server that is away. */
  timeoutMs?: number;
  /** Ends the waiting: the call rejects with its reason at once, and the request is withdrawn in the background. */
  signal?: AbortSignal;
  /** The id of the request and of its permit; drawn. Whoever repeats it gets the same permit, or the same place. */
  ticket?: string;
  /** From 0 to 100: each step may pass up to ten earlier requests. */
  priority?: number;
  weight?: number; metadata?: Record<string, string>;
}

type Make<Made> = (pending: Pending, permit: Permit, outcome: Outcome) => Made;

const CLOSE_WITHIN_MS = 5000, TTL_MS = 86_400_000;

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
  semaphore(name: string, options: Terms & {capacity: number}): Semaphore { return new Semaphore(this, name, options); }

  /** Returns a lock: a semaphore of capacity 1. */
  lock(name: string, options: Terms = {}): Semaphore { return this.semaphore(name, {...options, capacity: 1}); }

  /** Releases what is held, withdraws what waits, and disconnects; takes 5 s at most. Permits of `acquire` stay held. */
  async close(): Promise<void> { await this.session.close(CLOSE_WITHIN_MS); }

  [Symbol.asyncDispose](): Promise<void> { return this.close(); }
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
  hold(request: Request = {}): Promise<Hold> { return this.#granted(request, true, (...grant) => new Hold(...grant)); }

  /** Waits for a permit as data, which nobody renews: `renew` and `release` it. */
  acquire(request: Request = {}): Promise<Permit> { return this.#granted(request, false, (_, permit) => permit); }

  /** Returns a permit as data if one is to be had without waiting; it passes nobody who waits. */
  tryAcquire(request: Omit<Request, "timeoutMs"> = {}): Promise<Permit | undefined> {
    return this.#obtain(request, false, false, (_, permit) => permit);
  }

  /** Gives a permit a full lease again; throws `LeaseLost` if it is no longer held. */
  async renew(permit: Permit): Promise<Permit> {
    const {ticket, fence, lease_ms} = permit;
    const values = {ticket, fence, lease_ms, shorten: 0, idle_ttl_ms: this.#terms.idleTtlMs};
    const [deadline, capacity] = (await this.client.connection.call("renew", this.#terms.keys, values)) as [number, number];
    if (!deadline) throw new LeaseLost(`permit ${ticket} (fence ${fence}) is no longer held; acquire again`, this.name, ticket);
    return {...permit, expires_at_ms: deadline, capacity};
  }

  /** Gives a permit back, or takes whatever has that ticket out of the queue or from its holder; tells whether it was there. */
  async release(permit: Permit | string): Promise<boolean> {
    const {leaseMs: tombstone_ms, idleTtlMs: idle_ttl_ms} = this.#terms; // late copies of its request are to grant nothing
    const {ticket, fence} = typeof permit === "string" ? {ticket: text("ticket", permit, 256), fence: ""} : permit;
    const values = {ticket, fence, request: "", tombstone_ms, notify: fence === "" ? 1 : 0, idle_ttl_ms};
    const reply = await this.client.connection.call("release", this.#terms.keys, values);
    if (reply[1]) this.client.session.followUp(this.#terms);
    return reply[0] === 1;
  }

  /** Tells whether the permit is held now under its fence. */
  async isHeld({ticket, fence}: Permit): Promise<boolean> {
    return (await this.client.connection.call("check", this.#terms.keys, {ticket, fence}))[0] === 1;
  }

  /** Returns who holds and who waits, in order, at most `limit` of each. */
  async inspect(limit = 1000): Promise<Snapshot> {
    const reading = new Reading(this.name, this.#terms.capacity, count("limit", limit, 0));
    let values;
    while ((values = reading.values)) reading.add(await this.client.connection.call("inspect", this.#terms.keys, values));
    return reading.snapshot;
  }

  #ask({ticket, weight = 1, priority = 0, metadata = {}}: Request, renewed: boolean, queue: boolean): Ask {
    count("weight", weight);
    count("priority", priority, 0, 100);
    const drawn = ticket === undefined ? `${this.client.connection.clientId}-${randomBytes(6).toString("hex")}` : text("ticket", ticket, 256);
    const told = JSON.stringify(metadata);
    if (told[0] !== "{" || !Object.values(metadata).every((each) => typeof each === "string")) throw new RangeError("metadata maps strings to strings");
    if (Buffer.byteLength(told) > 8192) throw new RangeError("metadata may have 8192 bytes as JSON");
    return {...this.#terms, ticket: drawn, weight, priority, metadata, renewed, queue};
  }

  async #granted<Made>(request: Request, renewed: boolean, make: Make<Made>): Promise<Made> {
    const made = await this.#obtain(request, renewed, request.timeoutMs !== 0, make);
    if (made) return made;
    throw new AcquireTimeout("no capacity is free and timeoutMs is 0; the request was not queued", this.name);
  }

  /** Makes something of a grant, or returns undefined if it was not to wait and had to; any other ending leaves nothing behind. */
  async #obtain<Made>(request: Request, renewed: boolean, queue: boolean, make: Make<Made>): Promise<Made | undefined> {
    const {timeoutMs, signal} = request;
    const limitMs = !queue ? ANSWER_WITHIN_MS : timeoutMs === undefined ? Infinity : duration("timeoutMs", timeoutMs, 0);
    signal?.throwIfAborted();
    const pending = this.client.session.enter(this.#ask(request, renewed, queue));
    const abort = () => pending.fail(signal!.reason);
    signal?.addEventListener("abort", abort, {once: true});
    const timer = new Timer(() => pending.fail(timedOut(pending, limitMs, this.client.connection)));
    timer.set(nowMs() + limitMs);
    try {
      const outcome = await pending.done;
      signal?.throwIfAborted();
      const made = outcome && nowMs() < outcome.untilMs && make(pending, this.#permitOf(pending, outcome), outcome);
      pending.leave(!!made);
      return outcome && (made || this.#obtain(request, renewed, queue, make)); // the lease was over before this task went on
    } catch (error) {
      pending.leave(false);
      throw error;
    } finally {
      timer.clear();
      signal?.removeEventListener("abort", abort);
    }
  }

  #permitOf({ask}: Pending, outcome: Outcome): Permit {
    const {resource, ticket, weight, leaseMs, owner, metadata} = ask;
    const {fence, capacity, grantedAtMs, deadlineMs} = outcome;
    const times = {lease_ms: leaseMs, granted_at_ms: grantedAtMs, expires_at_ms: deadlineMs};
    return {resource, ticket, fence, weight, capacity, ...times, owner, metadata};
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
  const ended = (async () => {
    const result = await body(hold);
    if (hold.lost) throw hold.signal.reason;
    return result;
  })();
  await ended.then(() => hold.release(), () => hold.release().catch(() => {})); // its error would hide that of the body
  return ended;
}
