-- renew: gives a permit a full lease again, if it is still held. An expired permit is never revived.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket fence lease_ms shorten idle_ttl_ms
--       (shorten 1: the lease may end earlier than before; "told": and its holder is notified of that; 0: never; "write": never,
--       and there is a write even in the ms of the grant, in which nothing changes: WAIT waits for writes.
--       The lease of a shared ticket is never shortened: other requests rely on it)
-- Reply: {tag, deadline, capacity, waiting}; deadline 0 if the permit is no longer held
-- Cost: O(log n).
local tag, ticket, its_fence, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local shorten, idle = ARGV[5], tonumber(ARGV[6])

--#include renew_usual
--#include state
read(ticket)
--#include form
--#include repair
if not record then return {tag, 0, capacity, 0} end
local _, held_fence, its_lease, _, place, request = parse(record)
local was_until = held_fence == its_fence and tonumber(call('ZSCORE', holders, ticket) or 0) or 0
if was_until <= now then return {tag, 0, capacity, 0} end
local waiting = was.waiting
local deadline = shorten ~= '0' and shorten ~= 'write' and string.byte(record) ~= 48 and now + lease or math.max(was_until, now + lease)
if was_until > deadline then
  (function() -- a function of its own, so that its locals enlarge no other call's stack
--#include queue
    publish_to_head()
    if shorten == 'told' then publish(place, 'r ' .. request) end
  end)()
end
call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
lease_until(ticket, deadline)
if tonumber(its_lease) ~= lease or (shorten == 'write' and deadline == was_until) then
  set('t' .. ticket, (string.gsub(record, '^(%d+ %d+ )%d+', '%1' .. format('%d', lease))))
end
if size > 2 or expires < math.max(now + idle, deadline) then commit(deadline, idle) end
return {tag, deadline, capacity, waiting}
