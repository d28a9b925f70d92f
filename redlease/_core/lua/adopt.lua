-- adopt: takes over a held permit, with a new fence so that its former holder is refused from then on.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket fence request place lease_ms refence idle_ttl_ms label
--       (refence 0: keep the fence)
-- Reply: {tag, fence, granted_at, deadline, weight, capacity}; {tag, 0} if it is no longer held under that fence
-- Cost: O(log n).
local tag, ticket, its_fence, request, place = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local lease, refence, idle, label = tonumber(ARGV[6]), ARGV[7] == '1', tonumber(ARGV[8]), ARGV[9]

--#include state
read(ticket)
--#include form
--#include repair
if not record then return {tag, 0} end
local weight, held_fence, _, since, held_place, held_request = parse(record)
-- An earlier copy of this adoption was executed and its reply was lost; other requests may share the ticket since.
local repeated = string.byte(held_fence) ~= 48 and string.find('}' .. held_request .. '{', '}' .. request .. '{', 1, true)
local was_until = (held_fence == its_fence or repeated) and tonumber(call('ZSCORE', holders, ticket) or 0) or 0
if was_until <= now then return {tag, 0} end

-- With a new fence only the adopter holds it, unless other requests share the ticket since; with the old fence it may be held
-- elsewhere too. If it is shared, its lease must not end earlier.
local alone = refence and (not repeated or held_request == request)
local deadline = alone and now + lease or math.max(was_until, now + lease)
--#include queue
--#include share
if was_until > deadline then publish_to_head() end
call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
if refence and not repeated then
  held_fence = next_fence()
  publish_to_sharers(held_place, held_request, 'x', '') -- its former holders have lost it
end
if not alone then
  place, request = share.changed(held_place, held_request, request, place)
end
lease_until(ticket, deadline)
set('t' .. ticket, share.record(weight, held_fence, lease, since, place, request, label))
if not repeated then note('adopted', ticket, held_fence, weight, now - since, label) end
commit(deadline, idle)
return {tag, tonumber(held_fence), tonumber(since), deadline, weight, capacity}
