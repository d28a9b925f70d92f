// What a program sees of the client, on the server of the URL that is given. Each check is a sentence.
import assert from "node:assert/strict";
import {setTimeout as sleep} from "node:timers/promises";
import {Redis} from "ioredis";
import {nowMs, Timer} from "../src/clock.js";
import {codeOf} from "../src/protocol.js";
import {AcquireTimeout, LeaseLost, QueueFull, Redlease, Unavailable, Withdrawn, withPermit} from "../src/index.js";

const url = process.argv[2]!;
const client = new Redlease(url);
const other = new Redlease(url);
const raw = new Redis(url);
const sees = async (name: string, waiting: number) => {
  const lock = other.lock(name);
  while ((await lock.inspect()).waiting !== waiting) await sleep(2);
};

const CHECKS: Record<string, () => Promise<void>> = {
  async "tasks are granted in their order, never more than the capacity at once"() {
    const pool = client.semaphore("order", {capacity: 3});
    const entered: number[] = [];
    const fences: number[] = [];
    let inside = 0;
    await Promise.all(Array.from({length: 60}, (_, number) => withPermit(pool, async ({fence}) => {
      entered.push(number);
      fences.push(fence);
      assert(++inside <= 3);
      await sleep(1);
      inside--;
    })));
    assert.deepEqual(entered, Array.from({length: 60}, (_, number) => number));
    assert.deepEqual(fences, [...fences].sort((one, another) => one - another));
  },

  async "a permit as data is renewed, checked and released, and a repeated ticket gets the same"() {
    const pool = client.semaphore("data", {capacity: 2});
    const permit = await pool.acquire({ticket: "order-42", metadata: {k: "ä"}, weight: 2});
    assert.equal((await other.semaphore("data", {capacity: 2}).acquire({ticket: "order-42", weight: 2})).fence, permit.fence);
    assert.equal(await pool.tryAcquire(), undefined);
    await assert.rejects(pool.acquire({timeoutMs: 0}), AcquireTimeout);
    assert.deepEqual((await pool.inspect()).holders.map(({ticket, metadata}) => [ticket, metadata]), [["order-42", {}]]);
    assert((await pool.renew(permit)).expires_at_ms >= permit.expires_at_ms);
    assert.equal(await pool.isHeld(permit), true);
    assert.equal(await pool.release(permit), true);
    assert.equal(await pool.release(permit), false);
    await assert.rejects(pool.renew(permit), LeaseLost);
  },

  async "a holder and a waiter without a record are shown as damaged, and the others as ever"() {
    const pool = client.semaphore("damaged", {capacity: 2});
    for (const ticket of ["sound", "lost"]) await pool.acquire({ticket});
    const queued = other.semaphore("damaged", {capacity: 2}).acquire({ticket: "garbled"});
    await sees("damaged", 1);
    await raw.hdel("redlease:{damaged}:state", "tlost");
    const garbled = (await raw.hget("redlease:{damaged}:state", "tgarbled"))!;
    await raw.hset("redlease:{damaged}:state", "tgarbled", "garbage");
    const {holders, waiters, damaged, in_use} = await pool.inspect();
    assert.deepEqual([holders.map(({ticket}) => ticket), waiters, in_use], [["sound"], [], 2]);
    assert.deepEqual(damaged.map(({kind, name, reason}) => [kind, name, reason]), [
      ["holder", "lost", "its record is missing"], ["waiter", "garbled", "its record is unreadable"],
    ]);
    await raw.hset("redlease:{damaged}:state", "tgarbled", garbled);
    assert.equal(await pool.release(holders[0]!), true);
    assert((await queued).fence > 0);
  },

  async "an error is known by the word that it begins with, not by what the server repeats"() {
    const wrapped = `ERR Error running script (call to f_${"0".repeat(40)}): @user_script:1: `;
    assert.equal(codeOf("BUSY Redis is busy running a script."), "BUSY");
    assert.equal(codeOf(`${wrapped}@user_script: 1: -OOM command not allowed`), "OOM");
    assert.equal(codeOf("ERR unknown command `SCRIPT`, with args beginning with: `LOAD`, `-- BUSY`, "), "ERR");
    assert.equal(codeOf(`${wrapped}user_script:1: LOADING is no function`), "ERR");
  },

  async "who gives up leaves the queue: by a timeout, by a signal, and before it begins"() {
    const held = await client.lock("up").hold();
    await other.lock("up").inspect(); // it is connected now, and a second is long enough to be queued
    await assert.rejects(other.lock("up").hold({timeoutMs: 1000}), AcquireTimeout);
    const controller = new AbortController();
    const waiting = assert.rejects(other.lock("up").acquire({signal: controller.signal}), /enough/);
    await sees("up", 1);
    controller.abort(new Error("enough"));
    await waiting;
    await sees("up", 0);
    await assert.rejects(other.lock("up").acquire({signal: controller.signal}), /enough/);
    assert.equal(await held.release(), true);
    assert.equal((await client.lock("up").inspect()).in_use, 0);
  },

  async "a short lease is renewed, and a message wakes who waits"() {
    const lock = client.lock("short", {leaseMs: 2000, waiterLeaseMs: 60_000});
    const hold = await lock.hold();
    const {expires_at_ms} = hold.permit;
    const next = lock.hold();
    await sees("short", 1);
    while (hold.permit.expires_at_ms < expires_at_ms + 600) await sleep(20);
    hold.check();
    await hold.release();
    assert((await next).fence > hold.fence);
    assert.equal(await (await next).release(), true);
  },

  async "a loss aborts the signal, and withPermit throws it; an error of the body is thrown as it is"() {
    const lock = client.lock("loss");
    const losing = withPermit(lock, async (hold) => {
      await other.lock("loss").release(hold.ticket);
      await new Promise((resolve) => hold.signal.addEventListener("abort", resolve));
      assert(hold.lost && hold.signal.reason instanceof LeaseLost);
    });
    await assert.rejects(losing, LeaseLost);
    await assert.rejects(withPermit(lock, async () => { throw new Error("mine"); }), /mine/);
    {
      await using hold = await lock.hold();
      assert.equal(await lock.tryAcquire(), undefined);
      hold.check();
    }
    assert.equal((await lock.inspect()).in_use, 0);
  },

  async "misuse is refused before anything is sent"() {
    assert.throws(() => client.lock(""), RangeError);
    assert.throws(() => client.semaphore("x", {capacity: 0}), RangeError);
    assert.throws(() => client.lock("x", {leaseMs: 1}), RangeError);
    assert.throws(() => new Redlease(url, {prefix: "a b"}), RangeError);
    assert.throws(() => new Redlease("http://localhost:6379"), RangeError);
    for (const metadata of ["text", ["a"], {a: 1}]) {
      await assert.rejects(client.lock("x").hold({metadata: metadata as unknown as Record<string, string>}), RangeError);
    }
    const pool = client.semaphore("misuse", {capacity: 2, maxWaiters: 0});
    await assert.rejects(pool.hold({weight: 3}), RangeError);
    const permit = await pool.hold({weight: 2, ticket: "t"});
    await assert.rejects(pool.hold({ticket: "t"}), RangeError);
    await assert.rejects(pool.hold(), QueueFull);
    await permit.release();
    assert.equal(await raw.exists("redlease:{x}:state"), 0);
  },

  async "waiters whose place is gone queue anew, in their order"() {
    const lock = client.lock("gone", {waiterLeaseMs: 500, leaseMs: 60_000});
    const held = await lock.hold();
    const order: string[] = [];
    const waiting = ["b", "a"].map((ticket) => lock.hold({ticket}).then(async (hold) => (order.push(ticket), hold.release())));
    await sees("gone", 2);
    await raw.zremrangebyrank("redlease:{gone}:waiters", 0, -1); // as if the process had been silent for too long
    await sleep(600);
    await held.release();
    await Promise.all(waiting);
    assert.deepEqual(order, ["b", "a"]);
  },

  async "closing releases what is held and withdraws what waits; a permit as data stays"() {
    const closing = new Redlease(url);
    const hold = await closing.lock("one").hold();
    await closing.lock("two").acquire();
    const waiting = assert.rejects(closing.lock("two").acquire(), Withdrawn);
    await sees("two", 1);
    await closing.close();
    await waiting;
    assert.equal((await client.lock("one").inspect()).in_use, 0);
    const {in_use, waiting: left} = await client.lock("two").inspect();
    assert.deepEqual([in_use, left], [1, 0]);
    assert.equal(hold.lost, false);
    await assert.rejects(closing.lock("one").hold(), /closed/);
  },

  async "a hold and a waiter outlive killed connections and a server without scripts, and a second release changes nothing"() {
    const lock = client.lock("cut", {leaseMs: 1500});
    const hold = await lock.hold();
    const next = other.lock("cut").hold();
    await sees("cut", 1);
    const {expires_at_ms} = hold.permit;
    await raw.script("FLUSH");
    for (const type of ["normal", "pubsub"] as const) await raw.client("KILL", "TYPE", type, "SKIPME", "yes");
    while (hold.permit.expires_at_ms === expires_at_ms) await sleep(20);
    hold.check();
    assert.deepEqual([await hold.release(), await hold.release()], [true, true]);
    const second = await next;
    assert(second.fence > hold.fence);
    await hold.release();
    second.check();
    assert.equal(await other.lock("cut").isHeld(second.permit), true);
    await second.release();
  },

  async "an error of the body is thrown though its release fails"() {
    const lock = client.lock("broken");
    const failing = withPermit(lock, async () => {
      await raw.set("redlease:{broken}:holders", "no sorted set"); // the server refuses to release
      throw new Error("mine");
    });
    await assert.rejects(failing, /mine/);
    await raw.del("redlease:{broken}:holders", "redlease:{broken}:state");
  },

  async "a server that is away is told of within the timeout"() {
    const away = new Redlease("redis://127.0.0.1:1/0");
    const told = (error: Error) => error instanceof Unavailable && /^x: .*ECONNREFUSED/.test(error.message);
    const lock = away.lock("x");
    const asked = [lock.hold({timeoutMs: 100}), lock.hold({timeoutMs: 0}), lock.acquire({timeoutMs: 0}), lock.tryAcquire()];
    await Promise.all(asked.map((each) => assert.rejects(each, told)));
    await away.close();
  },

  async "a wait of more weeks than a timer of Node.js can last is as long as was asked"() {
    const {setTimeout: real} = globalThis;
    let set = 0;
    globalThis.setTimeout = ((callback: () => void) => real(set++ ? () => {} : callback, 0)) as typeof setTimeout;
    const timer = new Timer(() => assert.fail("it is over"));
    timer.set(nowMs() + 60 * 86_400_000);
    while (set < 2) await sleep(1); // the first timer is over at once, and another is set
    globalThis.setTimeout = real;
    timer.clear();
  },
};

for (const [sentence, check] of Object.entries(CHECKS)) {
  await check();
  console.log(JSON.stringify({event: "shown", sentence}));
}
console.log(JSON.stringify({event: "done"}));
raw.disconnect();
await Promise.all([client.close(), other.close()]);
