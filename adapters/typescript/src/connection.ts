/** Two connections: one for calls, one for messages. A call is sent once here; who calls decides whether to repeat it. */
import {randomBytes} from "node:crypto";
import {Redis, type RedisOptions} from "ioredis";
import {at, nowMs, sleep, Timer, within} from "./clock.js";
import {RedleaseError, Unavailable} from "./errors.js";
import {LUA} from "./lua.js";
import {codeOf, url, words, type Operation, type Raw, type Values} from "./protocol.js";

const SILENCE_MS = [250, 3000] as const; // how long, at least and at most, a reply is waited for before the connection is given up
const RETRY_MS = 100;
export const ANSWER_WITHIN_MS = 5000; // how long a call that does not wait for others goes on
const TRANSIENT = new Set(["LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOSCRIPT", "READONLY"]);

/** Instead of an answer: repeat the call, after `waitMs`. `unanswered`: it may have been executed, or may be yet. */
export class Repeat { constructor(readonly unanswered: boolean, readonly waitMs = 0, readonly code = "") {} }

/** A reply without its tag, and the local time at which its call was sent. */
type Answer = {sentMs: number; reply: Raw[]};

// A command that has no answer when its connection ends fails, and is repeated by the rules of docs/protocol.md, not by ioredis.
const OPTIONS: RedisOptions = {
  ...{autoResendUnfulfilledCommands: false, enableOfflineQueue: false, maxRetriesPerRequest: 0},
  ...{lazyConnect: true, autoResubscribe: false, disableClientInfo: true, disconnectTimeout: 50, keepAlive: 5000},
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
  #isListening = false; #hasListened = false;
  #lastError = "it does not answer";
  #refusal: RedleaseError | undefined;
  #onChange: (() => void)[] = [];

  constructor(source: string | RedisOptions | Redis, prefix: string) {
    this.channel = `${prefix}:client:${this.clientId}`;
    const open = () => {
      if (typeof source === "string") return new Redis(url(source), OPTIONS);
      return source instanceof Redis ? source.duplicate(OPTIONS) : new Redis({...source, ...OPTIONS});
    };
    [this.#calls, this.#messages] = [open(), open()];
    for (const redis of [this.#calls, this.#messages]) {
      // ioredis waits for ever for the replies to what it sends before a connection is ready.
      const opening = new Timer(() => redis.disconnect(true));
      redis.on("connect", () => opening.set(nowMs() + SILENCE_MS[1])).on("ready", () => opening.clear());
      redis.on("close", () => opening.clear()).on("error", (error: Error) => this.#failed(error));
    }
    this.#calls.on("ready", () => this.#reached());
    this.#messages.on("ready", () => void this.#listen());
    this.#messages.on("close", () => (this.#isListening = false));
    this.#messages.on("message", (_channel: string, payload: string) => this.onMessage(payload));
  }

  /** Connects; tells whether calls can be sent, and the channel has been subscribed to, within that time. */
  async ready(withinMs = Infinity): Promise<boolean> {
    const untilMs = nowMs() + withinMs;
    for (const redis of [this.#calls, this.#messages]) if (redis.status === "wait") redis.connect().catch(() => {});
    while (!this.#isReady && nowMs() < untilMs) {
      if (this.#refusal) throw this.#refusal;
      await within(untilMs - nowMs(), new Promise<void>((resolve) => this.#onChange.push(resolve)), undefined);
    }
    return this.#isReady;
  }

  /** Sends a call once; throws if the server refuses it. */
  async attempt<Name extends Operation>(
    name: Name, keys: string[], values: Values<Name>, patienceMs = Infinity, withinMs = Infinity,
  ): Promise<Answer | Repeat> {
    if (!this.#isReady && !(await this.ready(withinMs))) return new Repeat(false);
    const [tag, sentMs] = [String(++this.#tag), nowMs()];
    const line = words(name, keys, tag, values);
    const patience = Math.max(SILENCE_MS[0], Math.min(patienceMs, SILENCE_MS[1]));
    let raw = await this.#send(["EVALSHA", ...line], patience);
    if (raw instanceof Repeat && raw.code === "NOSCRIPT") {
      await this.#send(["SCRIPT", "LOAD", LUA[name].text], patience);
      raw = await this.#send(["EVALSHA", ...line], patience);
    }
    if (raw instanceof Repeat) return raw;
    if (Array.isArray(raw) && String(raw[0]) === tag) return {sentMs, reply: raw.slice(1)};
    this.#calls.disconnect(true); // a reply is missing or was there twice: none on this connection can be trusted
    return new Repeat(true);
  }

  /** Sends a call, and repeats it until it is answered; throws `Unavailable` after `withinMs`. */
  async call<Name extends Operation>(name: Name, keys: string[], values: Values<Name>, withinMs = ANSWER_WITHIN_MS): Promise<Raw[]> {
    for (const untilMs = nowMs() + withinMs; ; ) {
      const answer = await this.attempt(name, keys, values, Infinity, untilMs - nowMs());
      if (!(answer instanceof Repeat)) return answer.reply;
      if (nowMs() + answer.waitMs >= untilMs) throw this.unavailable(withinMs);
      await sleep(answer.waitMs);
    }
  }

  unavailable(withinMs: number, resource?: string, ticket?: string): Unavailable {
    const advice = ticket === undefined ? "" : ". Repeating with the same ticket is safe";
    return new Unavailable(`no answer of the server within ${withinMs} ms (${this.#lastError})${advice}`, resource, ticket);
  }

  close(): void {
    this.#refusal = new RedleaseError("this client is closed: make a new one");
    for (const redis of [this.#calls, this.#messages]) redis.disconnect();
    this.#tell();
  }

  /** Called when a message is missing: confirms the subscription, or gives up the connection, which may be dead. */
  checkMessages(): void { if (this.#isListening) void this.#listen(); }

  get #isReady(): boolean { return this.#calls.status === "ready" && this.#hasListened; }

  #listen(): Promise<void> {
    const timer = at(nowMs() + SILENCE_MS[1], () => this.#messages.disconnect(true)); // then the command fails
    const listened = () => { if (!this.#isListening) (this.#isListening = true), this.#reached(); };
    const subscribed = this.#messages.subscribe(this.channel).then(listened, (error: Error) => this.#failed(error));
    return subscribed.finally(() => clearTimeout(timer));
  }

  #send([command, ...args]: (string | Buffer)[], patienceMs: number): Promise<Raw | Repeat> {
    const timer = at(nowMs() + patienceMs, () => this.#calls.disconnect(true)); // then the command fails
    const sent = this.#calls.callBuffer(String(command), args) as Promise<Raw>;
    return sent.catch((error: Error) => this.#problem(error)).finally(() => clearTimeout(timer));
  }

  /** Returns what to do after an error of the connection, and throws one of the server that a repetition does not mend. */
  #problem({name, message}: Error): Repeat {
    if (name !== "ReplyError") return new Repeat(true, 5);
    const code = codeOf(message);
    if (code === "READONLY") this.#calls.disconnect(true); // it is no longer the master
    if (TRANSIENT.has(code)) return new Repeat(false, RETRY_MS, code);
    const what = message.includes("non local key") ? "the call stopped half-way" : "nothing was changed";
    throw new RedleaseError(`the server refused the call; ${what} (server: ${message})`);
  }

  #reached(): void {
    this.#refusal = undefined;
    if (this.#hasListened && this.#isListening && this.#isReady) this.onReconnect();
    this.#hasListened ||= this.#isListening;
    this.#tell();
  }

  #failed({name, message}: Error): void {
    if (name !== "MaxRetriesPerRequestError") this.#lastError = message; // it follows one that says why
    // Such as a wrong password, or a right that is missing: to wait does not help.
    if (name === "ReplyError" && !TRANSIENT.has(codeOf(message))) {
      this.#refusal ??= new RedleaseError(`the server refused this client: ${message}`);
      this.#tell();
    }
  }

  #tell(): void { for (const resume of this.#onChange.splice(0)) resume(); }
}
