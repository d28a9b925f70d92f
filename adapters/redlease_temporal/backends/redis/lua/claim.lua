-- claim: makes a relay the owner of a watch and notifies the previous owner. A stored text stays.
-- KEYS: watches owners relays
-- ARGV: tag relay watch text lease_ms channel
--       (text: stored if the watch is new; lease_ms: of the relay, if it has none)
-- Reply: {tag, text}
-- Cost: O(log n) with n watches.
local tag, relay, watch, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local watches, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local had = redis.call('HGET', watches, watch)
local owner, written = string.match(had or '', '^(%S+) (.*)$')
-- A relay whose lease is gone gets one, so that others take this watch over if it dies before its next beat.
redis.call('ZADD', relays, 'NX', string.format('%d', now + tonumber(ARGV[5])), relay)
redis.call('HSET', watches, watch, relay .. ' ' .. (written or text))
redis.call('ZADD', owners, 0, relay .. ' ' .. watch)
if owner and owner ~= relay then
  redis.call('ZREM', owners, owner .. ' ' .. watch)
  redis.pcall('PUBLISH', ARGV[6], 'gone ' .. owner .. ' ' .. watch)
end
return {tag, written or text}
