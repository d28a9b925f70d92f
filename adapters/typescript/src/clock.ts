/** The local clock of deadlines, and waits by it. It is never compared with the server's. */
import {uptime} from "node:os";

/** The server rounds its clock down to whole ms: a lease may begin this much earlier than its call. */
export const SERVER_TICK_MS = 1;
const TIMER_MS_MAX = 2 ** 31 - 1;

// On Linux `performance.now()` stands still while the machine sleeps, and `uptime()`, in steps of 10 ms, does not. What the
// second has gained on the first is added, so that this clock is never behind. Elsewhere the first runs on by itself.
const gap = () => (process.platform === "linux" ? uptime() * 1000 - performance.now() : 0);
const begun = gap();
let asleepMs = 0;

/** Returns ms of a clock that is never set and runs while the machine sleeps; only differences mean something. */
export function nowMs(): number {
  asleepMs = Math.max(asleepMs, gap() - begun);
  return performance.now() + asleepMs;
}

/** Calls back at that time of `nowMs`, or sooner if it is weeks ahead: `Timer` waits for longer. */
export function at(dueMs: number, callback: () => void): NodeJS.Timeout {
  return setTimeout(callback, Math.min(Math.max(0, dueMs - nowMs()), TIMER_MS_MAX));
}

/** Resolves after so many ms. */
export const sleep = (ms: number) => new Promise<void>((resolve) => at(nowMs() + ms, resolve));

/** Resolves as the promise does, or with `otherwise` after so many ms. */
export function within<Result, Otherwise>(ms: number, promise: Promise<Result>, otherwise: Otherwise) {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<Otherwise>((resolve) => (timer = at(nowMs() + ms, () => resolve(otherwise))));
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** One timer, with the time at which it is due next. */
export class Timer {
  #dueMs = Infinity;
  #timer: NodeJS.Timeout | undefined;

  constructor(readonly onDue: () => void) {}

  set(dueMs: number): void {
    this.clear();
    this.#dueMs = dueMs;
    this.#timer = at(dueMs, () => (nowMs() < dueMs ? this.set(dueMs) : (this.clear(), this.onDue())));
  }

  /** Sets it unless it is due sooner already. */
  sooner(dueMs: number): void { if (dueMs < this.#dueMs) this.set(dueMs); }

  clear(): void {
    clearTimeout(this.#timer);
    this.#dueMs = Infinity;
  }
}
