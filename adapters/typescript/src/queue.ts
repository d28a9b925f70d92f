/** Requests that have no outcome yet, and the places in queues that a client keeps alive for them. */
import {randomBytes} from "node:crypto";
import {at, nowMs, SERVER_TICK_MS, sleep, within} from "./clock.js";
import {Repeat, type Answer, type Connection} from "./connection.js";
import {AcquireTimeout, QueueFull, RedleaseError, Withdrawn} from "./errors.js";
import {acquireValues, readAcquired, readBeaten, readMessage, type Acquired, type Ask, type Granted, type Message} from "./protocol.js";

const BEATS_A_LEASE = 3;
const STAGGER_PLACES = 200; // a waiter calls 1 ms later for each that is ahead of it, so that not all call at once
const ROUNDING_MS = 2; // the server rounds to whole ms
const FENCE_AHEAD_MS = 1000; // how far the fence of a message may be ahead of the server's clock
const RETRY_MS = 1000; // the pause after an error that a repetition may not mend

/** Returns what stands for a ticket among those of all resources. */
export const ticketOn = ({keys, ticket}: Ask) => `${keys[0]} ${ticket}`;

/** A grant, valid until `untilMs` by the local clock; `handedOver`: its lease is what was left of the place's. */
export interface Outcome {
  granted: Granted;
  untilMs: number;
  handedOver: boolean;
}

/** One request, until it is granted, refused or given up. It ends once; later outcomes are ignored. */
export class Pending {
  readonly request: string;
  readonly done: Promise<Outcome | undefined>;
  /** Messages that came after the grant, for the hold. */
  readonly late: Message[] = [];
  sequence: number | undefined; // undefined: it is not known to be queued
  settled = false;
  sent = false;
  unsure = false; // a copy may still be on its way, or its reply was lost
  #end!: (outcome: Outcome | undefined) => void;
  #fail!: (error: unknown) => void;
  #asking = false;
  #again = false;
  #arrival = 0;
  #wasQueued = false;
  #place: Place | undefined;
  #askedFrom = "";
  #serverAheadMs = Infinity; // at most so much is the server's clock ahead of the local one

  constructor(readonly session: Session, readonly ask: Ask) {
    this.request = (ask.renewed ? "h" : "") + randomBytes(10).toString("hex");
    this.done = new Promise((resolve, reject) => ([this.#end, this.#fail] = [resolve, reject]));
  }

  end(outcome: Outcome | undefined): void {
    this.settled = true;
    this.#end(outcome);
  }

  fail(error: unknown): void {
    this.settled = true;
    this.#fail(error);
  }

  /** Sends the request, again if it was sent before: it gets the permit or place that it has. */
  async send(): Promise<void> {
    this.#again = true;
    if (this.#asking) return;
    this.#asking = true;
    try {
      while (this.#again && !this.settled) {
        this.#again = false;
        await this.#once();
      }
    } catch (error) {
      this.fail(error);
    }
    this.#asking = false;
  }

  async #once(): Promise<void> {
    const {ask, session} = this;
    await session.connection.ready();
    if (this.settled) return;
    const place = session.placeOn(ask);
    const from = place.name;
    this.#place = place;
    place.waiters.add(this);
    const arrival = this.#wasQueued ? "+0" : this.#arrival;
    this.sent = true;
    try {
      const {sentMs, reply} = await session.connection.attempt("acquire", ask.keys, acquireValues(ask, this.request, from, arrival));
      if (!this.settled) this.#read(sentMs, place, from, readAcquired(reply));
    } catch (error) {
      if (!(error instanceof Repeat)) throw error;
      this.unsure ||= error.unanswered;
      this.#again = true;
      await sleep(error.waitMs);
    }
  }

  #read(sentMs: number, place: Place, from: string, acquired: Acquired): void {
    const {ask} = this;
    switch (acquired.status) {
      case "granted":
        return this.end({granted: acquired, untilMs: sentMs + ask.leaseMs - SERVER_TICK_MS, handedOver: false});
      case "queued":
        this.#serverAheadMs = acquired.nowMs - sentMs;
        if (acquired.more) this.session.followUp(ask);
        this.#wasQueued = true;
        if (from !== place.name) return this.#repeat(); // only the new name is kept alive
        this.#askedFrom = from;
        this.sequence = acquired.sequence;
        return place.queued(sentMs, ask.waiterLeaseMs, acquired);
      case "lapsed":
        place.lapse(from);
        return this.#repeat();
      case "busy":
        return acquired.more ? this.#repeat() : this.#refused(undefined);
      case "full":
        if (!acquired.next) return this.#refused(new QueueFull(`${acquired.waiting} requests wait already`, ask.resource, ask.ticket));
        this.#arrival = -acquired.next;
        return this.#repeat();
      case "withdrawn":
        return this.fail(new Withdrawn("it was taken out of the queue by its ticket; ask again to queue anew", ask.resource, ask.ticket));
      case "misfit":
        return this.#refused(new RangeError(`weight ${ask.weight} can never fit into ${ask.resource}, whose capacity is ${acquired.capacity}`));
      case "otherWeight":
        return this.#refused(new RangeError(`ticket ${ask.ticket} of ${ask.resource} is known with weight ${acquired.weight}, not ${ask.weight}`));
    }
  }

  /** Ends it without a grant; there is nothing to release, unless an earlier copy was queued or may be yet. */
  #refused(error: Error | undefined): void {
    this.sent = this.unsure || this.#wasQueued;
    if (error) this.fail(error);
    else this.end(undefined);
  }

  #repeat(): void {
    this.#again = true;
    void this.send();
  }

  /** Takes a message about this request. A grant may be believed, since it names the secret id of the request. */
  onMessage({kind, numbers}: Message): void {
    if (this.settled) return void this.late.push({kind, numbers, about: this.request});
    if (kind !== "g" || !this.ask.renewed) return this.#repeat();
    const [fence, grantedAtMs, deadlineMs, capacity] = numbers as [number, number, number, number];
    const placeUntilMs = this.#place?.name === this.#askedFrom ? this.#place.untilMs : undefined;
    const untilMs = Math.min(placeUntilMs ?? 0, deadlineMs - this.#serverAheadMs - SERVER_TICK_MS); // the message may be late
    if (nowMs() >= untilMs || fence > (nowMs() + this.#serverAheadMs + FENCE_AHEAD_MS) * 1000) return this.#repeat();
    this.end({granted: {status: "granted", fence, grantedAtMs, deadlineMs, capacity}, untilMs, handedOver: true});
  }

  /** Forgets the request; if it was not granted, the server is told in the background, whatever it has or may still get. */
  leave(granted: boolean): void {
    this.settled = true;
    this.session.pending.delete(this.request);
    if (!granted || !this.ask.renewed) this.session.tickets.delete(ticketOn(this.ask));
    this.#place?.leave(this);
    if (granted || !this.sent) return;
    const untilMs = nowMs() + this.ask.waiterLeaseMs + this.ask.leaseMs;
    this.session.release(this, undefined, true, untilMs).catch(() => {});
  }
}

/** This client's place in the queue of one resource: one deadline, which one heartbeat extends, for all that wait there. */
export class Place {
  readonly waiters = new Set<Pending>();
  name: string;
  untilMs: number | undefined; // undefined: the server has not confirmed it
  #timer: NodeJS.Timeout | undefined;
  #dueMs = Infinity;
  #beating = false;

  constructor(readonly session: Session, readonly keys: string[]) {
    this.name = session.newName();
  }

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

  queued(sentMs: number, leaseMs: number, reply: {ahead: number; soonestMs: number}): void {
    this.#plan(Math.min(this.#dueMs, this.#confirm(sentMs, leaseMs, reply.ahead, reply.soonestMs)));
  }

  beatNow(): void {
    if (this.untilMs !== undefined) this.#plan(0);
  }

  /** Gives the place of that name up; whoever waits asks anew, from one with a higher epoch. */
  lapse(name: string): void {
    if (name !== this.name) return;
    const waiting = new Set([...this.#ordered, ...this.waiters]);
    this.name = this.session.newName();
    this.untilMs = undefined;
    this.#stop();
    for (const each of waiting) {
      each.sequence = undefined;
      void each.send();
    }
    if (!waiting.size) this.session.forget(this);
  }

  #stop(): void {
    clearTimeout(this.#timer);
    this.#dueMs = Infinity;
  }

  #plan(dueMs: number): void {
    this.#stop();
    this.#dueMs = dueMs;
    this.#timer = at(dueMs, () => this.#due());
  }

  /** Takes note of an extended place; returns when to call next. */
  #confirm(sentMs: number, leaseMs: number, ahead: number, soonestMs: number): number {
    this.untilMs = Math.max(this.untilMs ?? 0, sentMs + leaseMs - SERVER_TICK_MS);
    const regular = sentMs + leaseMs / BEATS_A_LEASE;
    return soonestMs < 0 ? regular : Math.min(regular, nowMs() + soonestMs + ROUNDING_MS + Math.min(ahead, STAGGER_PLACES));
  }

  #due(): void {
    this.#dueMs = Infinity;
    if (this.untilMs === undefined) return;
    if (nowMs() >= this.untilMs) return this.lapse(this.name);
    const [first] = this.#ordered;
    this.#plan(this.untilMs); // until a reply says otherwise; without waiters the place is kept for the next, until it lapses
    if (first && !this.#beating) void this.#beat(first);
  }

  async #beat(first: Pending): Promise<void> {
    const {name, untilMs} = this;
    const leaseMs = Math.max(...[...this.waiters].map((each) => each.ask.waiterLeaseMs));
    const values = {place: name, waiter_lease_ms: leaseMs, ticket: first.ask.ticket, idle_ttl_ms: first.ask.idleTtlMs};
    this.#beating = true;
    let answer: Answer | Repeat;
    try {
      answer = await this.session.connection.attempt("beat", this.keys, values, leaseMs / BEATS_A_LEASE, untilMs! - nowMs());
    } catch (error) {
      answer = error instanceof Repeat ? error : new Repeat(String(error), false, RETRY_MS);
    }
    this.#beating = false;
    if (name !== this.name) return;
    if (answer instanceof Repeat) return this.#plan(nowMs() + answer.waitMs);
    this.#beaten(answer, leaseMs, first);
  }

  #beaten({sentMs, reply}: Answer, leaseMs: number, first: Pending): void {
    const beaten = readBeaten(reply);
    if (beaten.status === "lapsed") return this.lapse(this.name);
    if (beaten.status === "granted") { // and its message was lost, or is on its way
      this.#confirm(sentMs, leaseMs, 0, -1);
      if (!first.settled) this.session.connection.doubtMessages();
      first.sequence = undefined;
      void first.send();
      return this.#plan(this.#ordered.length ? 0 : this.untilMs!);
    }
    this.#plan(this.#confirm(sentMs, leaseMs, beaten.ahead, beaten.soonestMs));
    if (beaten.more) this.session.followUp(first.ask);
    for (const each of this.waiters) {
      if (each.ask.weight > beaten.capacity) void each.send(); // the reply says that it is a misfit
    }
  }
}

/** What a hold is for the session. */
export interface Listener {
  onMessage(message: Message): void;
  onReconnect(): void;
  release(): Promise<boolean>;
}

/** What one client keeps alive: its requests, its places, its holds, and releases that are still to be answered. */
export class Session {
  readonly pending = new Map<string, Pending>();
  readonly holds = new Map<string, Listener>();
  /** Those in use, each behind the key of its resource. */
  readonly tickets = new Set<string>();
  closed = false;
  readonly #places = new Map<string, Place>();
  readonly #releases = new Set<Promise<unknown>>();
  #epoch = 0;

  constructor(readonly connection: Connection) {
    connection.onMessage = (payload) => this.#onMessage(payload);
    connection.onReconnect = () => {
      for (const place of this.#places.values()) place.beatNow();
      for (const hold of this.holds.values()) hold.onReconnect();
    };
  }

  newName = () => `${this.connection.channel}|${++this.#epoch}`;

  /** Starts a request; its `done` gets the outcome. */
  enter(ask: Ask): Pending {
    if (this.closed) throw new RedleaseError("this client is closed: make a new one");
    const pending = new Pending(this, ask);
    const inUse = ticketOn(ask);
    if (this.tickets.has(inUse)) throw new RangeError(`ticket ${ask.ticket} of ${ask.resource} is in use in this client already`);
    this.tickets.add(inUse);
    this.pending.set(pending.request, pending);
    void pending.send();
    return pending;
  }

  placeOn({keys}: Ask): Place {
    let place = this.#places.get(keys[0]!);
    if (place?.untilMs !== undefined && nowMs() >= place.untilMs) place.lapse(place.name);
    if (!(place = this.#places.get(keys[0]!))) this.#places.set(keys[0]!, (place = new Place(this, keys)));
    return place;
  }

  forget(place: Place): void {
    if (this.#places.get(place.keys[0]!) === place) this.#places.delete(place.keys[0]!);
  }

  /** Releases what a request has, or under a fence its permit; repeats that until it is answered, or until that time. */
  release({ask, request, unsure}: {ask: Ask; request: string; unsure: boolean}, fence: number | undefined, bury: boolean, untilMs: number): Promise<boolean> {
    const done = (async () => {
      for (let unanswered = false, late = unsure; ; ) {
        const values = {ticket: ask.ticket, request, fence: fence ?? "", tombstone_ms: bury || late ? ask.leaseMs : 0, notify: 0};
        try {
          const patience = [ask.leaseMs / BEATS_A_LEASE, untilMs - nowMs()] as const;
          const {reply} = await this.connection.attempt("release", ask.keys, {...values, idle_ttl_ms: ask.idleTtlMs}, ...patience);
          if (reply[1]) this.followUp(ask);
          return reply[0] === 1 || unanswered; // a copy whose reply was lost has removed it
        } catch (error) {
          if (!(error instanceof Repeat) || nowMs() >= untilMs) throw error;
          if (error.unanswered) unanswered = late = true;
          await sleep(error.waitMs);
        }
      }
    })();
    const settled: Promise<unknown> = done.catch(() => {}).then(() => this.#releases.delete(settled));
    this.#releases.add(settled);
    return done;
  }

  /** Goes on with what a call has left at its limit of entries. */
  followUp({keys, idleTtlMs}: {keys: string[]; idleTtlMs: number}): void {
    const values = {ticket: "", request: "", fence: "", tombstone_ms: 0, notify: 0, idle_ttl_ms: idleTtlMs};
    this.connection.attempt("release", keys, values).then(({reply}) => reply[1] && this.followUp({keys, idleTtlMs}), () => {});
  }

  /** Ends what is pending and held; resolves when the server knows, or after `withinMs`. */
  async close(withinMs: number): Promise<void> {
    this.closed = true;
    for (const each of [...this.pending.values()]) {
      each.fail(new Withdrawn("this client was closed", each.ask.resource, each.ask.ticket));
      each.leave(false);
    }
    for (const hold of [...this.holds.values()]) hold.release().catch(() => {});
    await within(withinMs, Promise.all(this.#releases), undefined);
    for (const place of this.#places.values()) place.lapse(place.name);
    this.connection.close();
  }

  #onMessage(payload: string): void {
    const message = readMessage(payload);
    if (!message) return;
    if (message.kind === "c" || message.kind === "l") {
      const place = this.#places.get(message.about);
      place?.beatNow();
      // It may have overtaken the reply that queued a request.
      for (const each of place?.waiters ?? []) if (message.kind === "c" && each.sequence === undefined) void each.send();
      return;
    }
    (this.pending.get(message.about) ?? this.holds.get(message.about))?.onMessage(message);
  }
}

/** The error of a request whose time is over. */
export function timedOut({ask, sequence}: Pending, timeoutMs: number, connection: Connection): RedleaseError {
  if (sequence === undefined) return connection.unavailable(timeoutMs, ask.resource, ask.ticket);
  return new AcquireTimeout(`no permit within ${timeoutMs} ms; the request is out of the queue`, ask.resource, ask.ticket);
}
