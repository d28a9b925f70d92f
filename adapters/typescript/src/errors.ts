/** The errors. Misuse that no retry can mend is a `RangeError`, as of an empty name or a capacity below 1. */

/** A call could not be carried out; `resource` and `ticket` tell what it was about. */
export class RedleaseError extends Error {
  constructor(message: string, readonly resource?: string, readonly ticket?: string) {
    super(resource === undefined ? message : `${resource}: ${message}`);
    this.name = new.target.name;
  }
}

/** No capacity was free within `timeoutMs`; the request is out of the queue. */
export class AcquireTimeout extends RedleaseError {}

/** A permit was held and no longer is, or can no longer be known to be. */
export class LeaseLost extends RedleaseError {}

/** So many requests wait already as `maxWaiters` allows; this one was not queued. */
export class QueueFull extends RedleaseError {}

/** A request was removed from the queue by its ticket, or its client was closed. */
export class Withdrawn extends RedleaseError {}

/** The server could not be reached in time: the outcome is unknown, and a retry with the same ticket is safe. */
export class Unavailable extends RedleaseError {}
