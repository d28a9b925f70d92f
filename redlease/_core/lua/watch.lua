-- watch: has the other scripts publish changes to the channel <state>:watch, for watch_ms.
-- KEYS: state holders queue waiters
-- ARGV: tag watch_ms
-- Reply: {tag, soonest}
-- Cost: O(log n).
local tag, watch_ms = ARGV[1], tonumber(ARGV[2])

--#include state
read('')
--#include form
--#include queue
local wait = soonest()
watched = math.max(watched, now + watch_ms)
local longer = expires < watched
expires = math.max(expires, watched)
call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
call('HSET', state, 'w', format('%d', watched), 'k', format('%d', expires))
if longer then writes.expire_all() end
return {tag, wait}
