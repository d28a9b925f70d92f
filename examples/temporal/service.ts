// A service in TypeScript without Temporal: its requests call the vendor under a permit on the same Redis.
import {setTimeout as sleep} from "node:timers/promises";
import {Redlease, withPermit} from "redlease";

const [url = "", resource = "", capacity = "1", requests = "1", takesMs = "0", restMs = "0"] = process.argv.slice(2);
await using client = new Redlease(url);
console.log("ready");

async function request(name: string): Promise<void> {
  const pool = client.semaphore(resource, {capacity: Number(capacity), owner: name});
  const asked = Date.now();
  await withPermit(pool, async (hold) => {
    const began = Date.now();
    await sleep(Number(takesMs));
    console.log(JSON.stringify({name, asked, began, ended: Date.now(), fence: hold.fence}));
  });
}

const running: Promise<void>[] = [];
for (let number = 1; number <= Number(requests); number += 1) {
  running.push(request(`TypeScript service ${number}`));
  await sleep(Number(restMs));
}
await Promise.all(running);
