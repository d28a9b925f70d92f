export {Redlease, Semaphore, Guard, withPermit, type Request, type Terms} from "./client.js";
export {Hold} from "./hold.js";
export * from "./errors.js";
export type {Permit, Snapshot, Waiter} from "./protocol.js";
