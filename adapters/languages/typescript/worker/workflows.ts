import { ApplicationFailure, condition, continueAsNew, defineSignal, setHandler } from '@temporalio/workflow';
import { Locks } from '../redlease.js';

/** Holds a permit until it is told to go on, and ends as it is asked to. */
export async function Hold(endpoint: string, how: string): Promise<number> {
  if (how === 'successor') return 0;
  let told = false;
  setHandler(defineSignal('proceed'), () => void (told = true));
  return new Locks(endpoint).withPermit('r', 1, async (permit) => {
    await condition(() => told);
    if (how === 'fail') throw ApplicationFailure.nonRetryable('as asked', 'Asked');
    if (how === 'continue') await continueAsNew<typeof Hold>(endpoint, 'successor');
    return permit.fence;
  });
}

/** Takes so many turns, one after the other, and returns how many it had. */
export async function Turns(endpoint: string, turns: number): Promise<number> {
  const locks = new Locks(endpoint);
  let had = 0;
  while (had < turns) had += await locks.withPermit('r', 1, () => 1);
  return had;
}
