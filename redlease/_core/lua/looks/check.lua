-- check: returns whether a permit is held now, under this fence. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket fence
-- Reply: {tag, held}
-- Cost: O(1).
local tag, ticket, its_fence = ARGV[1], ARGV[2], ARGV[3]

--#include state
read(ticket)
--#include form
if not record then return {tag, 0} end
local _, held_fence = parse(record)
local deadline = held_fence == its_fence and call('ZSCORE', holders, ticket)
return {tag, deadline and tonumber(deadline) > now and 1 or 0}
