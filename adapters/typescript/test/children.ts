// Processes that hold and wait, for tests that kill and stop them: `node children.js WHAT URL OPTIONS`, as tests/support/children.py.
import {readFileSync, writeFileSync} from "node:fs";
import {setTimeout as sleep} from "node:timers/promises";
import {Redis} from "ioredis";
import {Redlease, withPermit, type Hold} from "../src/index.js";

const say = (event: string, details: object = {}) => process.stdout.write(`${JSON.stringify({event, ...details})}\n`);
const [what, url, given] = process.argv.slice(2) as [string, string, string];
const {prefix, ...options} = JSON.parse(given);
const client = new Redlease(url, {prefix});

// Adds a line to a list, whose order is that of the server.
const note = (redis: Redis, log: string, ...words: unknown[]) => redis.rpush(log, words.join(" "));

/** Tells the turn of a body in which the permit is lost, or before which the process stood still for a lease; then it would write. */
async function goOn(hold: Hold, leaseMs: number): Promise<void> {
  for (let before = performance.now(); ; before = performance.now()) {
    await sleep(10);
    const stood = performance.now() - before > leaseMs;
    if (!stood && !hold.signal.aborted) continue;
    say("turn", {lost: hold.lost, aborted: hold.signal.aborted, reason: hold.signal.reason?.name});
    return void say("writes", {fence: hold.fence, released: await hold.release()});
  }
}

const ROLES = {
  /** Hold the lock until that is over. */
  async hold({leaseMs}: {leaseMs: number}) {
    const hold = await client.lock("r", {leaseMs}).hold();
    say("held", {fence: hold.fence, permit: hold.permit});
    await goOn(hold, leaseMs);
  },

  /** Wait for the lock, and hold it. */
  async wait({waiterLeaseMs}: {waiterLeaseMs: number}) {
    const lock = client.lock("r", {waiterLeaseMs, leaseMs: 60_000});
    const before = (await lock.inspect()).waiting;
    const holding = lock.hold();
    while ((await lock.inspect()).waiting === before) await sleep(5);
    say("waiting");
    const hold = await holding;
    say("held", {fence: hold.fence});
    await sleep(60_000);
  },

  /** Acquire a lock for each line that the test sends, named by it. */
  async acquire({leaseMs}: {leaseMs: number}) {
    await client.lock("first").inspect();
    say("connected");
    for await (const line of process.stdin) {
      const hold = await client.lock(String(line).trim(), {leaseMs}).hold();
      say("held", {fence: hold.fence});
    }
  },

  /** Add one to the number in a file so many times, in a way that loses some where two do it at once. */
  async count({path, times}: {path: string; times: number}) {
    const fences: number[] = [];
    for (let done = 0; done < times; done++) {
      await withPermit(client.lock("r", {leaseMs: 10_000}), async (hold) => {
        const number = Number(readFileSync(path, "utf8"));
        await sleep(1);
        writeFileSync(path, String(number + 1));
        fences.push(hold.fence);
      });
    }
    say("counted", {fences});
  },

  /** Have some tasks take turns on a pool, and note on the server when each enters and leaves. */
  async turns({tasks, times, capacity, log, direct}: {tasks: number; times: number; capacity: number; log: string; direct: string}) {
    const redis = new Redis(direct);
    const pool = client.semaphore("r", {capacity, waiterLeaseMs: 60_000, leaseMs: 60_000});
    const task = async () => {
      for (let done = 0; done < times; done++) {
        await withPermit(pool, async (hold) => {
          await note(redis, log, "enter", hold.ticket, hold.fence);
          await sleep(Math.random() * 4);
          await note(redis, log, "leave", hold.ticket, hold.fence);
        });
      }
    };
    await Promise.all(Array.from({length: tasks}, task));
    say("done");
    redis.disconnect();
  },
};

await ROLES[what as keyof typeof ROLES](options);
await client.close();
