export {Redlease, Semaphore, withPermit, type Request} from "./client.js";
export {Hold} from "./hold.js";
export * from "./errors.js";
export type {Permit, Snapshot, Terms, Waiter} from "./protocol.js";
