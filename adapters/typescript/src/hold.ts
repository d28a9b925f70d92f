/** A permit that this process holds: renewed in the background, with its loss noticed by the local clock. */
import {at, nowMs, SERVER_TICK_MS, within} from "./clock.js";
import {LeaseLost} from "./errors.js";
import type {Ask, Message, Permit} from "./protocol.js";
import {ticketOn, type Outcome, type Pending, type Session} from "./queue.js";

const RENEWALS_A_LEASE = 3;
const CLAIM_MS = 250; // after which a grant that was handed over is renewed to its full lease
const RECOVER_MS = 250; // after a reconnect, all leases are renewed within this time
const RETRY_MS_MAX = 5000;
const RELEASE_WITHIN_MS = 3000; // so long `release` waits for the server; it is repeated in the background after that

export class Hold implements AsyncDisposable {
  readonly ask: Ask;
  readonly request: string;
  readonly unsure: boolean;
  readonly #session: Session;
  readonly #controller = new AbortController();
  #permit: Permit;
  #untilMs: number;
  #first: boolean; // its lease is still what was left of the place's
  #dueMs: number;
  #failures = 0;
  #ended = false;
  #loss: LeaseLost | undefined;
  #wake = () => {};
  #deadline: NodeJS.Timeout | undefined;
  #released: Promise<boolean> | undefined;

  constructor({session, ask, request, unsure, late}: Pending, permit: Permit, {untilMs, handedOver}: Outcome) {
    [this.#session, this.ask, this.request, this.unsure] = [session, ask, request, unsure];
    [this.#permit, this.#untilMs, this.#first] = [permit, untilMs, handedOver];
    const left = untilMs - nowMs();
    const soon = ask.leaseMs < left ? 0 : CLAIM_MS;
    this.#dueMs = nowMs() + Math.min(left / RENEWALS_A_LEASE, handedOver ? soon : Infinity);
    session.holds.set(request, this);
    this.#watch();
    void this.#keep();
    for (const message of late) this.onMessage(message);
  }

  get permit(): Permit {
    return this.#permit;
  }

  get ticket(): string {
    return this.ask.ticket;
  }

  /** The fencing token: give it to the resource with each write, so that it can refuse those of former holders. */
  get fence(): number {
    return this.#permit.fence;
  }

  /** Whether the permit was lost. Reads the clock: it is true in time even if the event loop was blocked or the process stopped. */
  get lost(): boolean {
    if (!this.#ended && !this.#loss && nowMs() >= this.#untilMs) {
      this.#lose("its lease ended before a renewal came through");
      this.#session.release(this, undefined, this.unsure, nowMs() + this.ask.leaseMs).catch(() => {});
    }
    return this.#loss !== undefined;
  }

  /** Aborts, with a `LeaseLost` as its reason, when the permit is lost. To get it looks at the clock, as `lost` does. */
  get signal(): AbortSignal {
    return void this.lost, this.#controller.signal;
  }

  /** Throws `LeaseLost` if the permit is no longer held; does no I/O. */
  check(): void {
    if (this.lost) throw this.#loss;
    if (this.#ended) throw this.#lossOf("it was released or detached here");
  }

  /** How many ms are left without a further renewal. */
  remainingMs(): number {
    return this.lost || this.#ended ? 0 : this.#untilMs - nowMs();
  }

  /** Gives the permit back; tells whether it was still held, as far as the server has answered. May be repeated. */
  release(): Promise<boolean> {
    return (this.#released ??= this.#release());
  }

  /** Stops renewing and returns the permit, which stays held until its lease ends. */
  detach(): Permit {
    this.check();
    this.#end();
    return this.#permit;
  }

  /** Releases it at the end of an `await using` block; throws `LeaseLost` if it was lost. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.lost) throw this.#loss;
    await this.release();
  }

  onMessage({kind}: Message): void {
    if (kind === "x" && !this.#ended && !this.lost) this.#lose("it was released by its ticket, or somebody else adopted it");
    if (kind !== "r") return;
    this.#first = false; // its lease was shortened: renew it to the full one
    this.#renewAt(nowMs());
  }

  onReconnect(): void {
    this.#renewAt(nowMs() + Math.random() * Math.min(RECOVER_MS, this.remainingMs() / 10));
  }

  async #release(): Promise<boolean> {
    if (this.lost || this.#ended) return false;
    this.#end();
    const {leaseMs} = this.ask;
    const done = this.#session.release(this, this.fence, this.unsure, Math.max(this.#untilMs, nowMs()) + leaseMs);
    return within(RELEASE_WITHIN_MS, done, false);
  }

  #lossOf(why: string): LeaseLost {
    const {resource, ticket} = this.ask;
    const what = `permit ${ticket} of ${resource} (fence ${this.fence}) is no longer held: ${why}`;
    return new LeaseLost(`${what}. Stop the work that needs it, or acquire again`, resource, ticket);
  }

  #lose(why: string): void {
    this.#loss = this.#lossOf(why);
    this.#end();
    this.#controller.abort(this.#loss);
  }

  #end(): void {
    this.#ended = true;
    this.#session.holds.delete(this.request);
    this.#session.tickets.delete(ticketOn(this.ask));
    clearTimeout(this.#deadline);
    this.#wake();
  }

  /** Looks at the clock when the lease ends, as far as is known now. */
  #watch(): void {
    if (!this.lost && !this.#ended) this.#deadline = at(this.#untilMs, () => this.#watch());
  }

  #renewAt(dueMs: number): void {
    this.#dueMs = Math.min(this.#dueMs, dueMs);
    this.#wake();
  }

  async #keep(): Promise<void> {
    for (;;) {
      while (!this.#ended && nowMs() < this.#dueMs) await this.#pause();
      if (this.#ended || this.lost) return;
      this.#dueMs = Infinity;
      try {
        if (await this.#renew()) this.#failures = 0;
      } catch {
        const wait = Math.min(100 * 2 ** this.#failures++, Math.max(100, Math.min(this.ask.leaseMs / 10, RETRY_MS_MAX)));
        this.#dueMs = Math.min(this.#dueMs, nowMs() + wait);
      }
    }
  }

  #pause(): Promise<void> {
    return new Promise((resolve) => {
      const timer = at(this.#dueMs, resolve);
      this.#wake = () => (clearTimeout(timer), resolve());
    });
  }

  async #renew(): Promise<boolean> {
    const {ask, fence} = this;
    const shorten = this.#first ? 1 : 0; // the place may have had longer to live than a lease lasts
    if (shorten) this.#untilMs = Math.min(this.#untilMs, nowMs() + ask.leaseMs - SERVER_TICK_MS);
    const values = {ticket: ask.ticket, fence, lease_ms: ask.leaseMs, shorten, idle_ttl_ms: ask.idleTtlMs};
    const patience = [ask.leaseMs / RENEWALS_A_LEASE, this.#untilMs - nowMs()] as const;
    const {sentMs, reply} = await this.#session.connection.attempt("renew", ask.keys, values, ...patience);
    if (this.#ended || this.lost) return false; // a loss that was told is final
    const [deadline, capacity] = reply as [number, number];
    if (!deadline) return this.#lose("the server no longer has it: it lapsed, was released by its ticket, or the data was lost"), false;
    this.#first = false;
    this.#untilMs = sentMs + ask.leaseMs - SERVER_TICK_MS;
    this.#permit = {...this.#permit, expires_at_ms: deadline, capacity};
    this.#dueMs = Math.min(this.#dueMs, sentMs + (ask.leaseMs / RENEWALS_A_LEASE) * (0.9 + 0.1 * Math.random()));
    return true;
  }
}
