-- drop: deletes a record; if its owner did not ask for that, notifies the owner.
-- KEYS: records owners relays
-- ARGV: tag relay record channel chain
--       (relay "": any owner; otherwise only if that relay owns it. chain "*": any chain of runs; otherwise only if the
--       record is for that chain)
-- Reply: {tag, dropped, text}; text: the stored text, "" if there was none
-- Cost: O(log n) with n records.
local tag, relay, record = ARGV[1], ARGV[2], ARGV[3]
local had = redis.call('HGET', KEYS[1], record)
local owner, text = string.match(had or '', '^(%S+) (.*)$')
if not owner or (relay ~= '' and owner ~= relay) then return {tag, 0, text or ''} end
if ARGV[5] ~= '*' and cjson.decode(text).chain ~= ARGV[5] then return {tag, 0, text} end
redis.call('HDEL', KEYS[1], record)
redis.call('ZREM', KEYS[2], owner .. ' ' .. record)
if relay == '' then redis.pcall('PUBLISH', ARGV[4], 'gone ' .. owner .. ' ' .. record) end
return {tag, 1, text}
