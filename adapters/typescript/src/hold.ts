/** A permit that this process holds: renewed in the background, with its loss noticed by the local clock. */
import {nowMs, SERVER_TICK_MS, Timer, within} from "./clock.js";
import {Repeat} from "./connection.js";
import {LeaseLost} from "./errors.js";
import {type Ask, type Message, type Permit} from "./protocol.js";
import {ticketOn, type Outcome, type Pending, type Session} from "./queue.js";

const RENEWALS_PER_LEASE = 3;
const FULL_LEASE_MS = 250; // after which a grant that was handed over is renewed to its full lease
const RECOVER_MS = 250; // after a reconnect, all leases are renewed within this time
const RETRY_MS = [100, 5000] as const;
const RELEASE_WITHIN_MS = 3000; // so long `release` waits for the server; it is repeated in the background after that

export class Hold implements AsyncDisposable {
  /** As it was granted; `expires_at_ms` is that of the last renewal. */
  readonly permit: Permit;
  readonly ask: Ask;
  readonly request: string;
  readonly unsure: boolean;
  readonly #session: Session;
  readonly #controller = new AbortController();
  readonly #deadline = new Timer(() => this.lost || this.#deadline.set(this.#untilMs));
  readonly #renewal = new Timer(() => void this.#renew());
  #untilMs: number;
  #first: boolean; // its lease is still what was left of the place's
  #renewing = false; #again = false; #failures = 0; #ended = false; #replaced = false;
  #loss: LeaseLost | undefined;
  #released: Promise<boolean> | undefined;

  constructor({session, ask, request, unsure, late}: Pending, permit: Permit, {untilMs, handedOver}: Outcome) {
    [this.permit, this.ask, this.request, this.unsure, this.#session] = [permit, ask, request, unsure, session];
    [this.#untilMs, this.#first] = [untilMs, handedOver];
    const left = untilMs - nowMs();
    const claim = ask.leaseMs < left ? 0 : FULL_LEASE_MS;
    session.holds.set(request, this);
    this.#deadline.set(untilMs);
    this.#renewal.set(nowMs() + Math.min(left / RENEWALS_PER_LEASE, handedOver ? claim : Infinity));
    for (const message of late) this.onMessage(message);
  }

  get ticket(): string { return this.permit.ticket; }

  /** The fencing token: give it to the resource with each write, so that it can refuse those of former holders. */
  get fence(): number { return this.permit.fence; }

  /** Whether the permit was lost. Reads the clock: true in time even if the event loop was blocked or the process stopped. */
  get lost(): boolean {
    if (!this.#ended && nowMs() >= this.#untilMs) {
      this.#lose("its lease ended before a renewal came through");
      void this.#giveUp();
    }
    return this.#loss !== undefined;
  }

  /** Aborts, with a `LeaseLost` as its reason, when the permit is lost. To get it reads the clock, as `lost` does. */
  get signal(): AbortSignal { return void this.lost, this.#controller.signal; }

  /** Throws `LeaseLost` if the permit is no longer held; does no I/O. */
  check(): void { if (this.lost || this.#ended) throw this.#loss ?? this.#lossBecause("it was released here"); }

  /** Gives the permit back; tells whether it was still held, as far as the server has answered. May be repeated. */
  release(): Promise<boolean> {
    if (this.lost && !this.#replaced) return Promise.resolve(false);
    if (!this.#ended) this.#end();
    const untilMs = this.#untilMs + this.ask.leaseMs;
    // The request that has replaced this one begins when the server hears that the body has ended.
    this.#released ??= this.lost ? this.#giveUp() : this.#session.release(this, this.fence, this.unsure, untilMs);
    return within(RELEASE_WITHIN_MS, this.#released, false);
  }

  /** Releases it at the end of an `await using` block; throws `LeaseLost` if it was lost. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.release();
    if (this.#loss) throw this.#loss;
  }

  /** Removes what the server may still have of a lost permit. */
  #giveUp(): Promise<boolean> { return this.#session.release(this, undefined, this.unsure, nowMs() + this.ask.leaseMs).then(() => false, () => false); }

  onMessage({kind, by}: Message): void {
    if (this.#ended) return;
    this.#replaced = kind === "s";
    if (kind === "x") this.#lose("it was released by its ticket, or somebody else adopted it");
    if (kind === "s") this.#lose(`the newer request ${by} replaced it`);
    if (kind !== "r") return;
    this.#first = false; // its lease was shortened: renew it to the full one
    this.#renewal.set(0);
  }

  onReconnect(): void {
    this.#renewal.sooner(nowMs() + Math.random() * Math.min(RECOVER_MS, (this.#untilMs - nowMs()) / 10));
  }

  #lossBecause(why: string): LeaseLost {
    const {resource, ticket, fence} = this.permit;
    const what = `permit ${ticket} (fence ${fence}) is no longer held: ${why}`;
    return new LeaseLost(`${what}. Stop the work that needs it, or acquire again`, resource, ticket);
  }

  #lose(why: string): void {
    this.#loss = this.#lossBecause(why);
    this.#end();
    this.#controller.abort(this.#loss);
  }

  #end(): void {
    this.#ended = true;
    this.#session.holds.delete(this.request);
    this.#session.tickets.delete(ticketOn(this.ask));
    this.#deadline.clear();
    this.#renewal.clear();
  }

  async #renew(): Promise<void> {
    this.#again = this.#renewing; // it may have been sent before what asks for this one
    if (this.#renewing || this.#ended || this.lost) return;
    this.#renewing = true;
    const {ask, fence} = this;
    const shorten = this.#first ? 1 : 0; // the place may have had longer to live than a lease lasts
    if (shorten) this.#untilMs = Math.min(this.#untilMs, nowMs() + ask.leaseMs - SERVER_TICK_MS);
    const values = {ticket: ask.ticket, fence, lease_ms: ask.leaseMs, shorten, idle_ttl_ms: ask.idleTtlMs};
    const patience = [ask.leaseMs / RENEWALS_PER_LEASE, this.#untilMs - nowMs()] as const;
    const sent = this.#session.connection.attempt("renew", ask.keys, values, ...patience);
    const answer = await sent.catch(() => new Repeat(false));
    this.#renewing = false;
    if (this.#ended || this.lost) return; // a loss that was told is final
    if (answer instanceof Repeat) {
      const most = Math.max(RETRY_MS[0], Math.min(ask.leaseMs / 10, RETRY_MS[1]));
      return this.#renewal.sooner(nowMs() + Math.min(RETRY_MS[0] * 2 ** this.#failures++, most));
    }
    const [deadline, capacity] = answer.reply as [number, number];
    if (!deadline) return this.#lose("the server no longer has it: it expired, was released by its ticket, or the data was lost");
    [this.#first, this.#failures, this.#untilMs] = [false, 0, answer.sentMs + ask.leaseMs - SERVER_TICK_MS];
    Object.assign(this.permit, {expires_at_ms: deadline, capacity});
    const dueMs = answer.sentMs + (ask.leaseMs / RENEWALS_PER_LEASE) * (0.9 + 0.1 * Math.random());
    this.#renewal.sooner(this.#again ? 0 : dueMs);
  }
}
