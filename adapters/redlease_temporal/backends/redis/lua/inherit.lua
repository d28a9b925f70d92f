-- inherit: makes a relay the owner of watches of a lapsed relay.
-- KEYS: watches owners relays
-- ARGV: tag relay from watches
--       (watches: their ids, separated by spaces, at most 100)
-- Reply: {tag, text, ...}; of the watches that the lapsed relay still owned
-- Cost: O(log n) for each watch.
local tag, relay, from = ARGV[1], ARGV[2], ARGV[3]
local watches, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

if tonumber(redis.call('ZSCORE', relays, from) or 0) > now then return {tag} end
local reply = {tag}
for watch in string.gmatch(ARGV[4], '%S+') do
  local owner, text = string.match(redis.call('HGET', watches, watch) or '', '^(%S+) (.*)$')
  if owner == from then
    redis.call('HSET', watches, watch, relay .. ' ' .. text)
    redis.call('ZADD', owners, 0, relay .. ' ' .. watch)
    redis.call('ZREM', owners, from .. ' ' .. watch)
    reply[#reply + 1] = text
  end
end
-- "!" sorts right after the space that ends a relay's name.
local left = redis.call('ZRANGEBYLEX', owners, '[' .. from .. ' ', '(' .. from .. '!', 'LIMIT', 0, 1)
if #left == 0 then redis.call('ZREM', relays, from) end
return reply
