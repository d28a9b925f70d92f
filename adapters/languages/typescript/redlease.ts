/**
 * Takes the locks of a redlease lock service from Temporal workflows, by Nexus.
 *
 * It is one file: copy it into your project. It needs @temporalio/workflow and nexus-rpc, and is tested with 1.24 and 0.0.3.
 *
 *     const locks = new Locks('redlease-locks');
 *     await locks.withPermit('gpu', 3, (permit) => train(permit.fence), { timeoutMs: 600_000 });
 */

import {
  ApplicationFailure,
  CancellationScope,
  CancelledFailure,
  createNexusServiceClient,
  workflowInfo,
} from '@temporalio/workflow';
import * as nexus from 'nexus-rpc';

const ANSWER_MS = 10_000; // how long an operation that does not wait may take
const TICKET_BYTES = 256; // how long a ticket may be
const REFUSALS = ['AcquireTimeout', 'QueueFull', 'LeaseLost', 'Withdrawn', 'Superseded', 'ValueError'];

/** The right to use `weight` units of a resource until its lease ends. Times are ms of the Redis server's clock. */
export interface Permit {
  resource: string;
  ticket: string;
  fence: number;
  weight: number;
  capacity: number;
  lease_ms: number;
  granted_at_ms: number;
  expires_at_ms: number;
  owner: string;
  metadata: Record<string, string>;
  key: string | null;
}

/** Options of a request. */
export interface Options {
  /** How long the permit stays valid without renewal: by default 30,000. */
  leaseMs?: number;
  /** How long to wait: by default without limit; not at all if it is negative, as that of a deadline in the past. */
  timeoutMs?: number;
  /** Units to hold: by default 1. */
  weight?: number;
  /** After this the permit is no longer renewed: by default never. */
  maxHoldMs?: number;
  /** Requests of different keys take turns. */
  key?: string;
  /** How large a share of the turns the key gets: by default 1. */
  share?: number;
}

interface Acquire {
  resource: string;
  capacity: number;
  ticket: string;
  weight: number;
  lease_ms: number;
  timeout_ms: number | null;
  max_hold_ms: number | null;
  key: string;
  share: number;
}

interface Release {
  resource: string;
  ticket: string;
  fence: number | null;
}

const lockService = nexus.service('redlease', {
  acquire: nexus.operation<Acquire, Permit>(),
  release: nexus.operation<Release, { released: boolean }>(),
  check: nexus.operation<Release, { held: boolean }>(),
  adopt: nexus.operation<{ permit: Permit }, Permit>(),
});

let asked = 0; // the requests of this run: each run has modules of its own

/** The locks of one service. */
export class Locks {
  private readonly service: ReturnType<typeof createNexusServiceClient<typeof lockService>>;

  /** The locks of the service behind a Nexus endpoint. */
  constructor(endpoint: string) {
    this.service = createNexusServiceClient({ endpoint, service: lockService });
  }

  /**
   * Runs the body under a permit, and releases it in every ending: an error, a cancellation and continue-as-new too.
   *
   * A closed run that did not come to that has its permit released by the service.
   */
  async withPermit<R>(
    resource: string,
    capacity: number,
    body: (permit: Permit) => R | Promise<R>,
    options: Options = {},
  ): Promise<R> {
    const permit = await this.acquire(resource, capacity, options);
    try {
      return await body(permit);
    } finally {
      await this.release(permit).catch(() => false); // without an answer, the service releases it when this run has closed
    }
  }

  /**
   * Waits for a permit, which the service renews while this run is open.
   *
   * It throws an error that has a `refusal`, that of a cancellation, or one that says that the service did not answer; the
   * request is then out of the queue.
   */
  async acquire(resource: string, capacity: number, options: Options = {}): Promise<Permit> {
    const ticket = nextTicket();
    const { leaseMs = 30_000, weight = 1, maxHoldMs, key = '', share = 1 } = options;
    const timeoutMs = options.timeoutMs === undefined ? undefined : Math.max(0, options.timeoutMs);
    const limit = timeoutMs === undefined ? {} : { scheduleToCloseTimeout: timeoutMs + ANSWER_MS };
    const call: Acquire = {
      ...{ resource, capacity, ticket, weight, key, share },
      lease_ms: leaseMs,
      timeout_ms: timeoutMs ?? null,
      max_hold_ms: maxHoldMs ?? null,
    };
    try {
      const permit = await this.service.executeOperation('acquire', call, limit);
      // The grant may come before the cancellation.
      if (CancellationScope.current().consideredCancelled) throw new CancelledFailure(`cancelled while it waited for ${resource}`);
      return permit;
    } catch (failure) {
      if (refusal(failure) === '') await this.end({ resource, ticket, fence: null }, leaseMs);
      throw failure;
    }
  }

  /** Gives a permit back, also after a cancellation; tells whether it was still held. */
  async release({ resource, ticket, fence, lease_ms }: Permit): Promise<boolean> {
    return this.end({ resource, ticket, fence }, lease_ms);
  }

  /** Asks whether a permit is held now. */
  async check({ resource, ticket, fence }: Permit): Promise<boolean> {
    const call = { resource, ticket, fence };
    return (await this.service.executeOperation('check', call, { scheduleToCloseTimeout: ANSWER_MS })).held;
  }

  /** Takes over a permit from the run that this one continues as new, which did not release it. */
  async adopt(permit: Permit): Promise<Permit> {
    return this.service.executeOperation('adopt', { permit }, { scheduleToCloseTimeout: ANSWER_MS });
  }

  private async end(call: Release, leaseMs: number): Promise<boolean> {
    const limit = { scheduleToCloseTimeout: leaseMs + ANSWER_MS };
    const done = await CancellationScope.nonCancellable(() => this.service.executeOperation('release', call, limit));
    return done.released;
  }
}

/** Returns a name that is the same in every replay and after a reset: the new run finds what the old one had. */
function nextTicket(): string {
  const { namespace, workflowId, originalExecutionRunId } = workflowInfo();
  asked += 1;
  const ticket = `${originalExecutionRunId}/${asked}`;
  const full = `${namespace}/${workflowId}/${ticket}`;
  return new TextEncoder().encode(full).length <= TICKET_BYTES ? full : ticket;
}

/** The name of the service's error, one of `REFUSALS`; '' of another error. */
export function refusal(failure: unknown): string {
  for (let cause = failure; cause instanceof Error; cause = cause.cause) {
    if (cause instanceof ApplicationFailure && cause.type && REFUSALS.includes(cause.type)) return cause.type;
  }
  return '';
}
