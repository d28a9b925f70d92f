-- adopt: takes over a held permit, with a new fence so that whoever had it before is refused from then on.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket fence request place lease_ms refence idle_ttl_ms label
--       (refence 0: keep the fence)
-- Reply: {tag, fence, granted_at, deadline, weight, capacity}; {tag, 0} when it is no longer held under that fence
-- Cost: O(log n).
local tag, ticket, its_fence, request, place = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local lease, refence, idle, label = tonumber(ARGV[6]), ARGV[7] == '1', tonumber(ARGV[8]), ARGV[9]

--#include state
read(ticket)
if not record then return {tag, 0} end
local weight, held_fence, _, since, held_place, held_request = parse(record)
local repeated = held_request == request -- its first copy came through and only the reply was lost
local was_until = (held_fence == its_fence or repeated) and tonumber(call('ZSCORE', holders, ticket) or 0) or 0
if was_until <= now then return {tag, 0} end

-- With a new fence it is the adopter's alone; without one it may be held elsewhere too, and must not end earlier there.
local deadline = refence and now + lease or math.max(was_until, now + lease)
if was_until > deadline then
--#include queue
  tell_head()
end
call('PEXPIREAT', state, format('%d', math.max(expires, deadline))) -- allowed on a full server, and so is the rest
if refence and not repeated then
  held_fence = next_fence()
  tell(held_place, 'x ' .. held_request) -- whoever had it has lost it
end
lease_until(ticket, deadline)
set('t' .. ticket, format('%d %s %d %s %s %s %s', weight, held_fence, lease, since, place, request, label))
settle(deadline, idle)
return {tag, tonumber(held_fence), tonumber(since), deadline, weight, capacity}
