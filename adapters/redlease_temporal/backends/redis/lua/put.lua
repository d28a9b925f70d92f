-- put: stores the text of a record that the relay owns.
-- KEYS: records owners relays
-- ARGV: tag relay record text generation
-- Reply: {tag, written}; written 0 if the relay no longer owns the record or it was dropped; -1 if the registry lost its data
-- Cost: O(1).
local tag, relay, record, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HGET', KEYS[1], '!') ~= ARGV[5] then return {tag, -1} end
local had = redis.call('HGET', KEYS[1], record)
if string.match(had or '', '^%S+') ~= relay then return {tag, 0} end
redis.call('HSET', KEYS[1], record, relay .. ' ' .. text)
return {tag, 1}
