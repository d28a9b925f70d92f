-- lay: stores a new watch on behalf of a caller that is no relay; the relay with the next beat takes it over.
-- KEYS: watches owners relays
-- ARGV: tag relay watch text channel
--       (relay: a name that no relay has; it counts as lapsed at once)
-- Reply: {tag, laid}; laid 0 if the watch exists
-- Cost: O(log n) with n watches.
local tag, relay, watch, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local watches, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

if redis.call('HGET', watches, watch) then return {tag, 0} end
redis.call('ZADD', relays, string.format('%d', now - 1), relay)
redis.call('HSET', watches, watch, relay .. ' ' .. text)
redis.call('ZADD', owners, 0, relay .. ' ' .. watch)
redis.pcall('PUBLISH', ARGV[5], 'left')
return {tag, 1}
