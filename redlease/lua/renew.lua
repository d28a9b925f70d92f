-- renew: gives a permit a full lease again, if it is still held. What has lapsed is never re-taken.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket fence lease_ms shorten idle_ttl_ms
--       (shorten 1: the lease may end earlier than before, "told" if whoever holds it is to hear of that; 0: never)
-- Reply: {tag, deadline, capacity, waiting}; deadline 0 when the permit is no longer held
-- Cost: O(log n).
local tag, ticket, its_fence, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local shorten, idle = ARGV[5], tonumber(ARGV[6])

--#include state
read(ticket)
if not record then return {tag, 0, capacity, 0} end
local weight, held_fence, its_lease, since, place, request, label = parse(record)
local was_until = held_fence == its_fence and tonumber(call('ZSCORE', holders, ticket) or 0) or 0
if was_until <= now then return {tag, 0, capacity, 0} end
local waiting = call('ZCARD', queue)
local deadline = shorten ~= '0' and now + lease or math.max(was_until, now + lease)
if was_until > deadline then
--#include queue
  tell_head()
  if shorten == 'told' then tell(place, 'r ' .. request) end
end
call('PEXPIREAT', state, format('%d', math.max(expires, deadline))) -- allowed on a full server, and so is the rest
lease_until(ticket, deadline)
if tonumber(its_lease) ~= lease then
  set('t' .. ticket, format('%d %s %d %s %s %s %s', weight, held_fence, lease, since, place, request, label))
end
if size > 2 or expires < math.max(now + idle, deadline) then settle(deadline, idle) end
return {tag, deadline, capacity, waiting}
