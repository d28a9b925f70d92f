-- add: stores a new record on behalf of a caller that is no relay; the relay with the next beat takes it over.
-- KEYS: records owners relays
-- ARGV: tag relay record text channel
--       (relay: a name that no relay has; it counts as lapsed at once)
-- Reply: {tag, added}; added 0 if the record exists
-- Cost: O(log n) with n records.
local tag, relay, record, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local records, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

if redis.call('HGET', records, record) then return {tag, 0} end
redis.call('ZADD', relays, string.format('%d', now - 1), relay)
redis.call('HSET', records, record, relay .. ' ' .. text)
redis.call('ZADD', owners, 0, relay .. ' ' .. record)
redis.pcall('PUBLISH', ARGV[5], 'left')
return {tag, 1}
