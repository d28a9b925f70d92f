-- resize: sets the capacity without declaring it, so that a restarted process with its old value does not undo it.
-- KEYS: state holders queue waiters
-- ARGV: tag capacity idle_ttl_ms
-- Reply: {tag, more} {tag, 0, declared}
--        (declared: it is that of a lock or of a read-write lock, which cannot be resized; nothing was changed)
-- Cost: O(log n) for each of at most 16 that it grants; up to 100 clients are notified of a smaller capacity.
local UNLIMITED = 2147483647 -- what a read-write lock declares
local tag, wanted, idle = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

--#include state
read('')
--#include form
--#include repair
if wanted ~= declared and (declared == 1 or declared == UNLIMITED) then return {tag, 0, declared} end
--#include queue
for i = 2, 4 do call('ZCARD', KEYS[i]) end -- a key of a wrong type fails here, before the first write
local shrinks = wanted < capacity
capacity = wanted
writes.begin()
--#include limits
local more = grant_waiting()
if shrinks then publish_capacity() end
commit(now, idle)
return {tag, more}
