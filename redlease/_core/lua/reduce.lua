-- reduce: gives back a part of a permit's weight, and grants it to the queue. The permit keeps its fence and its lease.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket fence weight idle_ttl_ms
-- Reply: {tag, held, more}; held 0 if the permit is no longer held under this fence. A weight that is not less changes nothing.
-- Cost: O(log n), and O(log n) for each of at most 16 that it grants.
local tag, ticket, its_fence, weight, idle = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

--#include state
read(ticket)
--#include form
--#include repair
--#include queue
if not record then return {tag, 0, 0} end
local its_weight, held_fence, _, since, _, _, label = parse(record)
local deadline = held_fence == its_fence and tonumber(call('ZSCORE', holders, ticket) or 0) or 0
if deadline <= now then return {tag, 0, 0} end
if weight >= its_weight then return {tag, 1, 0} end
for i = 3, 4 do call('ZCARD', KEYS[i]) end -- a key of a wrong type fails here, before the first write
writes.begin()
local shared = string.byte(record) == 48 and '0' or ''
call('HSET', state, 't' .. ticket, shared .. format('%d', weight) .. string.match(record, '^%d+( .*)$'))
used, excess = used - its_weight + weight, excess - its_weight + weight
local key = entry_of(ticket)
if key then turns.use(key, weight - its_weight) end
note('reduced', ticket, held_fence, weight, now - since, label)
local more = grant_waiting()
commit(now, idle)
return {tag, 1, more}
