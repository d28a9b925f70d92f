-- beat: keeps a client's place in the queue, tells how its first waiter stands, and does what time has made due.
-- KEYS: state holders queue waiters
-- ARGV: tag place waiter_lease_ms ticket idle_ttl_ms
--       (ticket: the first of the client's waiters in the order of arrival)
-- Reply: {tag, QUEUED, ahead, soonest, capacity, more}
--        {tag, GRANTED} the first is no longer queued: ask again for it; {tag, LAPSED} the place is gone: take a new one
-- Cost: O(log n), and for each of at most 100 that it reaps or grants.
local tag, place, waiter_lease, ticket, idle = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])

--#include state
--#include queue
read(ticket)
if capacity == 0 or not alive(place) then return {tag, LAPSED} end
local wait, ahead, more = soonest(), call('ZRANK', queue, ticket), 0
local deadline = now + waiter_lease
call('PEXPIREAT', state, format('%d', math.max(expires, deadline))) -- allowed on a full server, and so is the rest
call('ZADD', waiters, 'GT', format('%d', deadline), place)

local due = wait == 0 or used < capacity
if due then more = advance() end
if due or expires < math.max(now + idle, deadline) then settle(deadline, idle) end
if due then wait, ahead = soonest(), call('ZRANK', queue, ticket) end
if not ahead then return {tag, GRANTED} end
return {tag, QUEUED, ahead, wait, capacity, more}
