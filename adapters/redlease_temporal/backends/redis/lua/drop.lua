-- drop: deletes a watch; if its owner did not ask for that, notifies the owner.
-- KEYS: watches owners relays
-- ARGV: tag relay watch channel chain
--       (relay "": any owner; otherwise only if that relay owns it. chain "*": any chain of runs; otherwise only if the
--       watch is for that chain)
-- Reply: {tag, dropped, text}; text: the stored text, "" if there was none
-- Cost: O(log n) with n watches.
local tag, relay, watch = ARGV[1], ARGV[2], ARGV[3]
local had = redis.call('HGET', KEYS[1], watch)
local owner, text = string.match(had or '', '^(%S+) (.*)$')
if not owner or (relay ~= '' and owner ~= relay) then return {tag, 0, text or ''} end
if ARGV[5] ~= '*' and cjson.decode(text).chain ~= ARGV[5] then return {tag, 0, text} end
redis.call('HDEL', KEYS[1], watch)
redis.call('ZREM', KEYS[2], owner .. ' ' .. watch)
if relay == '' then redis.pcall('PUBLISH', ARGV[4], 'gone ' .. owner .. ' ' .. watch) end
return {tag, 1, text}
