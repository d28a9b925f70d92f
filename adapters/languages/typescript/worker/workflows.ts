import { ApplicationFailure, condition, continueAsNew, defineSignal, setHandler } from '@temporalio/workflow';
import { Locks, refusal } from '../redlease.js';

/** Holds a permit until it is told to go on, and ends as it is asked to. */
export async function Hold(endpoint: string, how: string): Promise<number> {
  if (how === 'successor') return 0;
  let told = false;
  setHandler(defineSignal('proceed'), () => void (told = true));
  const options = how === 'outlive' ? { leaseMs: 1000 } : {};
  return new Locks(endpoint).withPermit('r', how === 'outlive' ? 3 : 1, async (permit) => {
    await condition(() => told);
    if (how === 'fail') throw ApplicationFailure.nonRetryable('as asked', 'Asked');
    if (how === 'continue') await continueAsNew<typeof Hold>(endpoint, 'successor');
    return permit.fence;
  }, options);
}

/** Asks for what it holds already, by locks of its own and with a deadline in the past, and returns the refusal. */
export async function AsksTwice(endpoint: string): Promise<string> {
  return new Locks(endpoint).withPermit('r', 1, () =>
    new Locks(endpoint).acquire('r', 1, { timeoutMs: -20_000 }).then(() => '', refusal),
  );
}

/** Takes so many turns, one after the other, and returns how many it had. */
export async function Turns(endpoint: string, turns: number): Promise<number> {
  const locks = new Locks(endpoint);
  let had = 0;
  while (had < turns) had += await locks.withPermit('r', 1, () => 1);
  return had;
}
