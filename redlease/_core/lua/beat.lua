-- beat: heartbeat of a client's place in the queue; returns the position of its first waiter, and reaps and grants if due.
-- KEYS: state holders queue waiters
-- ARGV: tag place waiter_lease_ms ticket idle_ttl_ms
--       (ticket: the first of the client's waiters in the order of arrival)
-- Reply: {tag, QUEUED, ahead, soonest, capacity, more}
--        {tag, GRANTED} the first waiter is no longer queued: repeat its request; {tag, LAPSED} the place is gone: use a new one
-- Cost: O(log n), and O(log n) for each of at most 16 that it reaps or grants.
local tag, place, waiter_lease, ticket, idle = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])

--#include state
read(ticket, waiter_lease)
--#include form
--#include repair
--#include queue
if capacity == 0 or not alive(place) then return {tag, LAPSED} end
local key, entry = entry_of(ticket)
local function rank()
  local found = call('ZRANK', queue, entry)
  return found and turns.rank and turns.rank(key, entry) or found
end
local wait, ahead, more = soonest(), rank(), 0
local deadline = now + waiter_lease
call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
call('ZADD', waiters, 'GT', format('%d', deadline), place)

-- The first of a key that is at its limit may have died: nobody else looks, since only who may be granted has a turn.
if key then turns.use(key, 0) end
local due = is_due(wait) or used < capacity or key
if due then more = grant_waiting() end
replied_to = ticket
if due or expires < math.max(now + idle, deadline) then commit(deadline, idle) end
if due then wait, ahead = soonest(), rank() end
if not ahead then return {tag, GRANTED} end
return {tag, QUEUED, ahead, told(wait, ticket), capacity, more}
