/** Requests that have no outcome yet, and the places in queues that a client keeps alive for them. */
import {randomBytes} from "node:crypto";
import {nowMs, SERVER_TICK_MS, sleep, Timer, within} from "./clock.js";
import {Repeat, type Connection} from "./connection.js";
import {AcquireTimeout, QueueFull, RedleaseError, Withdrawn} from "./errors.js";
import type {Hold} from "./hold.js";
import {acquireValues, readAcquired, readBeaten, readMessage, type Ask, type Message, type Reply} from "./protocol.js";

const HEARTBEATS_PER_LEASE = 3;
const STAGGER_PLACES = 200; // a waiter calls 1 ms later for each that is ahead of it, so that not all call at once
const ROUNDING_MS = 2; // the server rounds to whole ms
const FENCE_AHEAD_MS = 1000; // how far the fence of a message may be ahead of the server's clock
const RETRY_MS = 1000; // the pause after an error that a repetition may not mend

/** Returns what stands for a ticket among those of all resources. */
export const ticketOn = ({keys, ticket}: Ask) => `${keys[0]} ${ticket}`;

/** A grant, valid until `untilMs` by the local clock; `handedOver`: its lease is what was left of the place's. */
export type Outcome = Pick<Reply, "fence" | "grantedAtMs" | "deadlineMs" | "capacity"> & {untilMs: number; handedOver: boolean};

/** What a release says of a request. */
type Request = Pick<Pending, "ask" | "request" | "unsure">;

/** One request, until it is granted, refused or given up. It ends once; later outcomes are ignored. */
export class Pending {
  readonly request: string;
  readonly done: Promise<Outcome | undefined>;
  readonly late: Message[] = []; // those that came after the grant, for the hold
  sequence: number | undefined; // undefined: it is not known to be queued
  settled = false;
  unsure = false; // a copy may still be on its way, or its reply was lost
  end!: (outcome: Outcome | undefined) => void;
  fail!: (error: unknown) => void;
  #asking = false; #again = false;
  #arrival: string | number = 0;
  #mayHave = false; // a place or a permit on the server, now or later
  #place: Place | undefined;
  #askedFrom = "";
  #serverAheadMs = Infinity; // at most so much is the server's clock ahead of the local one

  constructor(readonly session: Session, readonly ask: Ask) {
    this.request = (ask.renewed ? "h" : "") + randomBytes(10).toString("hex");
    this.done = new Promise((resolve, reject) => {
      this.end = (outcome) => ((this.settled = true), resolve(outcome));
      this.fail = (error) => ((this.settled = true), reject(error));
    });
  }

  /** Sends the request, again if it was sent before: it gets the permit or place that it has. */
  async send(): Promise<void> {
    this.#again = true;
    if (this.#asking) return;
    this.#asking = true;
    for (; this.#again && !this.settled; ) {
      this.#again = false;
      await this.#once().catch(this.fail);
    }
    this.#asking = false;
  }

  async #once(): Promise<void> {
    const {ask, session} = this;
    await session.connection.ready();
    if (this.settled) return;
    const place = (this.#place = session.placeOn(ask));
    const from = place.name;
    place.waiters.add(this);
    this.#mayHave = true;
    const values = acquireValues(ask, this.request, from, this.#arrival);
    const answer = await session.connection.attempt("acquire", ask.keys, values, ask.leaseMs / HEARTBEATS_PER_LEASE);
    if (answer instanceof Repeat) {
      this.unsure ||= answer.unanswered;
      this.#again = true;
      return sleep(answer.waitMs);
    }
    if (!this.settled) this.#read(answer.sentMs, place, from, readAcquired(answer.reply));
  }

  #read(sentMs: number, place: Place, from: string, reply: Reply): void {
    const {resource, ticket, weight, leaseMs, waiterLeaseMs} = this.ask;
    switch (reply.status) {
      case "granted":
        if (reply.more) this.session.followUp(this.ask);
        return this.end({...reply, untilMs: sentMs + leaseMs - SERVER_TICK_MS, handedOver: false});
      case "queued":
        this.#serverAheadMs = reply.nowMs - sentMs;
        if (reply.more) this.session.followUp(this.ask);
        this.#arrival = "+0"; // from now on it is no new request
        this.#askedFrom = from;
        if (from !== place.name) return void this.send(); // only the new name is kept alive
        this.sequence = reply.sequence;
        return place.queued(sentMs, waiterLeaseMs, reply);
      case "lapsed":
        place.lapse(from);
        return void this.send();
      case "full":
        if (!reply.next) return this.#refused(new QueueFull(`${reply.waiting} requests wait already`, resource, ticket));
        this.#arrival = -reply.next; // dead waiters are looked for, a few by each call
        return void sleep(reply.waitMs).then(() => this.send());
      case "busy": return reply.more ? void this.send() : this.#refused();
      case "misfit": return this.fail(new RangeError(`${resource}: weight ${weight} exceeds the capacity, ${reply.capacity}`));
      case "otherWeight": return this.#refused(new RangeError(`${resource}: ticket ${ticket} has ${reply.ofKey ? "a key" : `weight ${reply.weight}, not ${weight}`}`));
      case "withdrawn": return this.fail(new Withdrawn("it was removed from the queue by its ticket", resource, ticket));
    }
  }

  /** Ends it without a grant; there is nothing to give up, unless it was queued or an earlier copy may be yet. */
  #refused(error?: Error): void {
    this.#mayHave = this.unsure || this.#arrival === "+0";
    return error ? this.fail(error) : this.end(undefined);
  }

  /** Takes a message about this request. A grant may be believed, since it names the secret id of the request. */
  onMessage(message: Message): void {
    if (message.kind === "l") return this.settled ? undefined : this.#place?.beatIn(message.numbers[0]!);
    if (this.settled) return void this.late.push(message);
    // A copy that is on its way may shorten what the message says; its reply tells how long the lease is.
    if (message.kind !== "g" || !this.ask.renewed || this.#asking) return void this.send();
    const [fence, grantedAtMs, deadlineMs, capacity] = message.numbers as [number, number, number, number];
    const placeUntilMs = this.#place?.name === this.#askedFrom ? this.#place.untilMs : undefined;
    const untilMs = Math.min(placeUntilMs ?? 0, deadlineMs - this.#serverAheadMs - SERVER_TICK_MS); // it may be late
    const isAhead = fence > (nowMs() + this.#serverAheadMs + FENCE_AHEAD_MS) * 1000;
    if (nowMs() >= untilMs || isAhead) return void this.send();
    this.end({fence, grantedAtMs, deadlineMs, capacity, untilMs, handedOver: true});
  }

  /** Forgets the request; if it was not granted, gives up in the background what it has or may still get. */
  leave(granted: boolean): void {
    if (!this.session.pending.delete(this.request)) return; // closing the client did it
    this.#place?.leave(this);
    if (!granted || !this.ask.renewed) this.session.tickets.delete(ticketOn(this.ask));
    if (granted || !this.#mayHave) return;
    this.session.release(this, undefined, true, nowMs() + this.ask.waiterLeaseMs + this.ask.leaseMs).catch(() => {});
  }
}

/** This client's place on one resource: one deadline, which one heartbeat extends, for all of its requests there. */
export class Place {
  readonly waiters = new Set<Pending>();
  name: string;
  untilMs: number | undefined; // undefined: the server has not confirmed it
  readonly #timer = new Timer(() => this.#due());
  #beating = false;

  constructor(readonly session: Session, readonly keys: string[]) { this.name = session.newName(); }

  /** The waiters in the order of the queue, as far as their sequences are known. */
  get #ordered(): Pending[] {
    const order = (one: Pending, other: Pending) =>
      one.sequence! - other.sequence! || Buffer.compare(Buffer.from(one.ask.ticket), Buffer.from(other.ask.ticket));
    return [...this.waiters].filter((waiter) => waiter.sequence !== undefined).sort(order);
  }

  leave(waiter: Pending): void {
    this.waiters.delete(waiter);
    if (!this.waiters.size && this.untilMs === undefined) this.session.forget(this);
  }

  queued(sentMs: number, leaseMs: number, reply: Reply): void { this.#timer.sooner(this.#confirm(sentMs, leaseMs, reply)); }

  beatIn(waitMs: number): void { if (this.untilMs !== undefined) this.#timer.sooner(nowMs() + waitMs + (waitMs && ROUNDING_MS)); }

  /** Gives the place of that name up; whoever waits asks anew, from one with a higher epoch. */
  lapse(name: string): void {
    if (name !== this.name) return;
    const waiting = new Set([...this.#ordered, ...this.waiters]);
    [this.name, this.untilMs] = [this.session.newName(), undefined];
    this.#timer.clear();
    for (const each of waiting) {
      each.sequence = undefined;
      void each.send();
    }
    if (!waiting.size) this.session.forget(this);
  }

  /** Takes note of an extended place; returns when to call next. */
  #confirm(sentMs: number, leaseMs: number, {ahead, soonestMs}: Pick<Reply, "ahead" | "soonestMs">): number {
    this.untilMs = Math.max(this.untilMs ?? 0, sentMs + leaseMs - SERVER_TICK_MS);
    const expiryMs = nowMs() + soonestMs + ROUNDING_MS + Math.min(ahead, STAGGER_PLACES);
    return Math.min(sentMs + leaseMs / HEARTBEATS_PER_LEASE, soonestMs < 0 ? Infinity : expiryMs);
  }

  #due(): void {
    const untilMs = this.untilMs!; // without one no timer is set
    if (nowMs() >= untilMs) return this.lapse(this.name);
    const [first] = this.#ordered;
    this.#timer.set(untilMs); // until a reply says otherwise; without waiters the place stays for the next, until it lapses
    if (first && !this.#beating) void this.#beat(first, untilMs - nowMs());
  }

  async #beat(first: Pending, leftMs: number): Promise<void> {
    const {name} = this;
    const leaseMs = Math.max(...[...this.waiters].map((each) => each.ask.waiterLeaseMs));
    const values = {place: name, waiter_lease_ms: leaseMs, ticket: first.ask.ticket, idle_ttl_ms: first.ask.idleTtlMs};
    this.#beating = true;
    const sent = this.session.connection.attempt("beat", this.keys, values, leaseMs / HEARTBEATS_PER_LEASE, leftMs);
    const answer = await sent.catch(() => new Repeat(false, RETRY_MS));
    this.#beating = false;
    if (name !== this.name) return;
    if (answer instanceof Repeat) return this.#timer.sooner(nowMs() + answer.waitMs);
    const reply = readBeaten(answer.reply);
    if (reply.status === "lapsed") return this.lapse(name);
    if (reply.status === "granted") { // and its message was lost, or is on its way
      this.#confirm(answer.sentMs, leaseMs, {ahead: 0, soonestMs: -1});
      first.sequence = undefined;
      void first.send();
      this.session.connection.checkMessages();
      return this.#timer.set(this.#ordered.length ? 0 : this.untilMs!);
    }
    this.#timer.sooner(this.#confirm(answer.sentMs, leaseMs, reply));
    if (reply.more) this.session.followUp(first.ask);
    for (const each of this.waiters) if (each.ask.weight > reply.capacity) void each.send(); // the reply says: a misfit
  }
}

/** What one client keeps alive: its requests, its places, its holds, and releases that are still to be answered. */
export class Session {
  readonly pending = new Map<string, Pending>();
  readonly holds = new Map<string, Hold>();
  readonly tickets = new Set<string>(); // those in use
  readonly #places = new Map<string, Place>();
  readonly #releases = new Set<Promise<unknown>>();
  #epoch = 0; #closed = false;

  constructor(readonly connection: Connection) {
    connection.onMessage = (payload) => this.#onMessage(payload);
    connection.onReconnect = () => {
      for (const place of this.#places.values()) place.beatIn(0);
      for (const hold of this.holds.values()) hold.onReconnect();
    };
  }

  newName = () => `${this.connection.channel}|${++this.#epoch}`;

  /** Starts a request; its `done` gets the outcome. */
  enter(ask: Ask): Pending {
    const inUse = ticketOn(ask);
    if (this.#closed) throw new RedleaseError("this client is closed: make a new one");
    if (this.tickets.has(inUse)) throw new RangeError(`ticket ${ask.ticket} of ${ask.resource} is in use in this client already`);
    const pending = new Pending(this, ask);
    this.tickets.add(inUse);
    this.pending.set(pending.request, pending);
    void pending.send();
    return pending;
  }

  placeOn({keys}: Ask): Place {
    const known = this.#places.get(keys[0]!);
    if (known?.untilMs !== undefined && nowMs() >= known.untilMs) known.lapse(known.name);
    const place = this.#places.get(keys[0]!) ?? new Place(this, keys);
    this.#places.set(keys[0]!, place);
    return place;
  }

  forget(place: Place): void { if (this.#places.get(place.keys[0]!) === place) this.#places.delete(place.keys[0]!); }

  /** Releases what a request has, or under a fence its permit; repeats that until it is answered, or until that time. */
  release(what: Request, fence: number | undefined, bury: boolean, untilMs: number): Promise<boolean> {
    const done = this.#release(what, fence, bury, untilMs);
    const settled: Promise<unknown> = done.catch(() => {}).then(() => this.#releases.delete(settled));
    this.#releases.add(settled);
    return done;
  }

  async #release({ask, request, unsure}: Request, fence: number | undefined, bury: boolean, untilMs: number): Promise<boolean> {
    const {ticket, keys, leaseMs, idleTtlMs} = ask;
    for (let unanswered = false; ; ) {
      const tombstone_ms: number = bury || unsure || unanswered ? leaseMs : 0;
      const values = {ticket, request, fence: fence ?? "", tombstone_ms, notify: 0, idle_ttl_ms: idleTtlMs};
      const answer = await this.connection.attempt("release", keys, values, leaseMs / HEARTBEATS_PER_LEASE, untilMs - nowMs());
      if (!(answer instanceof Repeat)) {
        if (answer.reply[1]) this.followUp(ask);
        return answer.reply[0] === 1 || unanswered; // a copy whose reply was lost has removed it
      }
      if (nowMs() >= untilMs) return false;
      unanswered ||= answer.unanswered;
      await sleep(answer.waitMs);
    }
  }

  /** Goes on with what a call has left at its limit of entries. */
  async followUp({keys, idleTtlMs}: Pick<Ask, "keys" | "idleTtlMs">): Promise<void> {
    const values = {ticket: "", request: "", fence: "", tombstone_ms: 0, notify: 0, idle_ttl_ms: idleTtlMs};
    const answer = await this.connection.attempt("release", keys, values).catch(() => new Repeat(false));
    if (!(answer instanceof Repeat) && answer.reply[1]) return this.followUp({keys, idleTtlMs});
  }

  /** Ends what is pending and held; resolves when the server knows, or after `withinMs`. */
  async close(withinMs: number): Promise<void> {
    this.#closed = true;
    for (const each of this.pending.values()) {
      each.fail(new Withdrawn("this client was closed", each.ask.resource, each.ask.ticket));
      each.leave(false);
    }
    for (const hold of this.holds.values()) hold.release().catch(() => {});
    await within(withinMs, Promise.all(this.#releases), undefined);
    for (const place of this.#places.values()) place.lapse(place.name);
    this.connection.close();
  }

  #onMessage(payload: string): void {
    const message = readMessage(payload);
    if (!message) return;
    if (message.kind !== "c") return (this.pending.get(message.about) ?? this.holds.get(message.about))?.onMessage(message);
    const place = this.#places.get(message.about);
    place?.beatIn(0);
    // It may have overtaken the reply that queued a request.
    for (const each of place?.waiters ?? []) if (each.sequence === undefined) void each.send();
  }
}

/** Returns the error of a request whose time is over. */
export function timedOut({ask, sequence}: Pending, timeoutMs: number, connection: Connection): RedleaseError {
  if (sequence === undefined) return connection.unavailable(timeoutMs, ask.resource, ask.ticket);
  return new AcquireTimeout(`no permit within ${timeoutMs} ms; the request is out of the queue`, ask.resource, ask.ticket);
}
