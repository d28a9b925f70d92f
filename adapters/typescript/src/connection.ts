/** Two connections: one for calls, and one for messages. A call is sent once here; who calls decides whether to repeat it. */
import {randomBytes} from "node:crypto";
import {Redis, type RedisOptions} from "ioredis";
import {at, nowMs, sleep} from "./clock.js";
import {RedleaseError, Unavailable} from "./errors.js";
import {LUA} from "./lua.js";
import {words, type Operation, type Raw, type Values} from "./protocol.js";

/** How long the reply of a call is waited for, at most, before the connection is given up. */
export const PATIENCE_MS = 3000;
const PATIENCE_MS_MIN = 250;
const RETRY_MS = 100;
const CODES = /\b(LOADING|BUSY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOSCRIPT|READONLY|OOM|NOPERM|WRONGTYPE|NOREPLICAS|MISCONF|MOVED)\b/;
const TRANSIENT = new Set(["LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOSCRIPT", "READONLY"]);

/** A call is to be repeated, after `waitMs`; `unanswered`: it may have been executed, or may be yet. */
export class Repeat extends Error {
  constructor(message: string, readonly unanswered: boolean, readonly waitMs = 0) {
    super(message);
  }
}

/** A reply without its tag, and the local time at which its call was sent. */
export interface Answer {
  sentMs: number;
  reply: Raw[];
}

// A command that has no answer when its connection ends fails, and is repeated by the rules of docs/protocol.md, not by ioredis.
const OPTIONS: RedisOptions = {
  lazyConnect: true,
  autoResubscribe: false,
  autoResendUnfulfilledCommands: false,
  enableOfflineQueue: false,
  maxRetriesPerRequest: 0,
  disableClientInfo: true,
  disconnectTimeout: 50,
  retryStrategy: (times: number) => Math.min(20 * 2 ** Math.min(times, 6), 1000),
};

export class Connection {
  readonly clientId = randomBytes(8).toString("hex");
  readonly channel: string;
  /** Called when messages may have been lost: after each reconnect of either connection. */
  onReconnect = () => {};
  onMessage = (_payload: string) => {};
  readonly #calls: Redis;
  readonly #messages: Redis;
  #tag = 0;
  #isListening = false;
  #wasReady = false;
  #closed = false;
  #lastError = "no answer";
  #refusal: Error | undefined;
  #changed = new Set<() => void>();

  constructor(source: string | RedisOptions | Redis, prefix: string) {
    this.channel = `${prefix}:client:${this.clientId}`;
    const open = () => {
      if (typeof source === "string") return new Redis(source, OPTIONS);
      return source instanceof Redis ? source.duplicate(OPTIONS) : new Redis({...source, ...OPTIONS});
    };
    [this.#calls, this.#messages] = [open(), open()];
    for (const redis of [this.#calls, this.#messages]) {
      redis.on("error", (error: Error) => this.#failed(error));
      redis.on("close", () => this.#lost(redis));
      redis.on("ready", () => this.#connected(redis));
    }
    this.#messages.on("message", (_channel: string, payload: string) => this.onMessage(payload));
  }

  /** Connects, if that has not been done; resolves when calls can be sent and the channel has been subscribed to once. */
  async ready(withinMs = Infinity): Promise<void> {
    const untilMs = nowMs() + withinMs;
    for (const redis of [this.#calls, this.#messages]) if (redis.status === "wait") redis.connect().catch(() => {});
    while (!this.#isReady) {
      if (this.#closed) throw new RedleaseError("this client is closed: make a new one");
      if (this.#refusal) throw this.#refusal;
      if (nowMs() >= untilMs) throw new Repeat(`not connected: ${this.#lastError}`, false);
      await new Promise<void>((resolve) => {
        const timer = withinMs === Infinity ? undefined : at(untilMs, resolve);
        this.#changed.add(() => (clearTimeout(timer), resolve()));
      });
    }
  }

  /** Sends a call once. Throws `Repeat` if it has no answer, or one after which it may be repeated. */
  async attempt<Name extends Operation>(
    name: Name, keys: string[], values: Values<Name>, patienceMs = PATIENCE_MS, withinMs = Infinity,
  ): Promise<Answer> {
    if (!this.#isReady) await this.ready(withinMs);
    const tag = String(++this.#tag);
    const sentMs = nowMs();
    const line = words(name, keys, tag, values);
    const patience = Math.max(PATIENCE_MS_MIN, Math.min(patienceMs, PATIENCE_MS));
    let raw: Raw;
    try {
      raw = await this.#send(["EVALSHA", ...line], patience);
    } catch (error) {
      if (!(error instanceof Repeat) || !error.message.includes("NOSCRIPT")) throw error;
      await this.#send(["SCRIPT", "LOAD", LUA[name].text], patience);
      raw = await this.#send(["EVALSHA", ...line], patience);
    }
    if (Array.isArray(raw) && String(raw[0]) === tag) return {sentMs, reply: raw.slice(1)};
    this.#calls.disconnect(true); // a reply is missing or was there twice: none on this connection can be trusted
    throw new Repeat("a reply to another call", true);
  }

  /** Sends a call, and repeats it until it is answered; throws `Unavailable` after `withinMs`. */
  async call<Name extends Operation>(name: Name, keys: string[], values: Values<Name>, withinMs: number): Promise<Answer> {
    const untilMs = nowMs() + withinMs;
    for (;;) {
      try {
        return await this.attempt(name, keys, values, PATIENCE_MS, untilMs - nowMs());
      } catch (error) {
        if (!(error instanceof Repeat)) throw error;
        if (nowMs() + error.waitMs >= untilMs) throw this.unavailable(withinMs);
        await sleep(error.waitMs);
      }
    }
  }

  unavailable(withinMs: number, resource?: string, ticket?: string): Unavailable {
    const message = `the server could not be reached within ${withinMs} ms: ${this.#lastError}. Repeating with the same ticket is safe`;
    return new Unavailable(message, resource, ticket);
  }

  /** Checks the connection of messages: one was missed. */
  doubtMessages(): void {
    if (!this.#isListening) return;
    const timer = at(nowMs() + PATIENCE_MS, () => this.#messages.disconnect(true));
    this.#messages.ping().catch(() => {}).finally(() => clearTimeout(timer));
  }

  close(): void {
    this.#closed = true;
    this.#calls.disconnect();
    this.#messages.disconnect();
    this.#tell();
  }

  get #isReady(): boolean {
    return this.#calls.status === "ready" && this.#wasReady && !this.#closed;
  }

  #send(line: string[], patienceMs: number): Promise<Raw> {
    const [command, ...args] = line as [string, ...string[]];
    return new Promise((resolve, reject) => {
      const timer = at(nowMs() + patienceMs, () => {
        this.#calls.disconnect(true);
        reject(new Repeat(`no answer within ${patienceMs} ms`, true));
      });
      (this.#calls.callBuffer(command, args) as Promise<Raw>)
        .then(resolve, (error: Error) => reject(this.#problem(error)))
        .finally(() => clearTimeout(timer));
    });
  }

  /** Returns what to do after an error: of the connection, or of the server. */
  #problem(error: Error): Error {
    if (error.name !== "ReplyError") return new Repeat(`${error.message} (${this.#lastError})`, true, 5);
    const code = CODES.exec(error.message)?.[0] ?? error.message.split(" ", 1)[0]!;
    if (code === "READONLY") this.#calls.disconnect(true); // it is no longer the master
    if (TRANSIENT.has(code)) return new Repeat(error.message, false, RETRY_MS);
    // With one exception an error means that nothing was changed; see docs/protocol.md.
    const what = error.message.includes("non local key") ? "the call stopped half-way" : "nothing was changed";
    return new RedleaseError(`the server refused the call; ${what} (server: ${error.message})`);
  }

  #connected(redis: Redis): void {
    this.#refusal = undefined;
    if (redis === this.#calls) return this.#reached();
    redis.subscribe(this.channel).then(() => {
      this.#isListening = true;
      this.#reached();
    }, (error: Error) => this.#failed(error));
  }

  #reached(): void {
    if (!this.#isListening || this.#calls.status !== "ready") return this.#tell();
    if (this.#wasReady) this.onReconnect();
    this.#wasReady = true;
    this.#tell();
  }

  #lost(redis: Redis): void {
    if (redis === this.#messages) this.#isListening = false;
  }

  #failed(error: Error): void {
    this.#lastError = error.message;
    // Such as a wrong password, or a right that is missing: to wait does not help.
    if (error.name === "ReplyError" && !TRANSIENT.has(CODES.exec(error.message)?.[0] ?? "")) {
      this.#refusal = new RedleaseError(`the server refused this client: ${error.message}`);
      this.#tell();
    }
  }

  #tell(): void {
    const waiting = this.#changed;
    this.#changed = new Set();
    for (const resume of waiting) resume();
  }
}
