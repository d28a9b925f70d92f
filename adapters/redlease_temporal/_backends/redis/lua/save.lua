-- save: stores the text of a record that the relay owns. It keeps the note of a release that it does not know of.
-- KEYS: records owners relays
-- ARGV: tag relay record text generation
-- Reply: {tag, written, text}; written 0 if the relay no longer owns the record or it was dropped; -1 if the registry
--        lost its data; text: as it was stored if that is not what was given, else ""
-- Cost: O(1).
local tag, relay, record, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HGET', KEYS[1], '!') ~= ARGV[5] then return {tag, -1, ''} end
local owner, had = string.match(redis.call('HGET', KEYS[1], record) or '', '^(%S+) (.*)$')
if owner ~= relay then return {tag, 0, ''} end
local known = not string.find(text, '"release":null', 1, true)
local stored = known and text or noted(text, had)
redis.call('HSET', KEYS[1], record, relay .. ' ' .. stored)
return {tag, 1, stored == text and '' or stored}
