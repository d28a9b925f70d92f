-- claim: makes a relay the owner of a record and notifies the previous owner. A stored text stays, but for the note of a
--        release: it takes over a new one that is about the same.
-- KEYS: records owners relays
-- ARGV: tag relay record text lease_ms channel
--       (text: stored if the record is new; lease_ms: of the relay, if it has none)
-- Reply: {tag, text}
-- Cost: O(log n) with n records.
local tag, relay, record, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local records, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local had = redis.call('HGET', records, record)
local owner, written = string.match(had or '', '^(%S+) (.*)$')
text = written and noted(written, text) or text
-- A relay whose lease is gone gets one, so that others take this record over if it dies before its next beat.
redis.call('ZADD', relays, 'NX', string.format('%d', now + tonumber(ARGV[5])), relay)
redis.call('HSET', records, record, relay .. ' ' .. text)
redis.call('ZADD', owners, 0, relay .. ' ' .. record)
if owner and owner ~= relay then
  redis.call('ZREM', owners, owner .. ' ' .. record)
  redis.pcall('PUBLISH', ARGV[6], 'gone ' .. owner .. ' ' .. record)
end
return {tag, text}
