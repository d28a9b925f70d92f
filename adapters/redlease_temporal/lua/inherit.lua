-- inherit: a relay takes over the watches of one that has lapsed.
-- KEYS: watches owners relays
-- ARGV: tag relay from
-- Reply: {tag, more, watch, text, ...}; more 1 when there are further ones: at most 100 are taken over a call
-- Cost: O(log n) for each watch.
local tag, relay, from = ARGV[1], ARGV[2], ARGV[3]
local watches, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

if tonumber(redis.call('ZSCORE', relays, from) or 0) > now then return {tag, 0} end
-- "!" comes right after the space that ends a relay's name.
local members = redis.call('ZRANGEBYLEX', owners, '[' .. from .. ' ', '(' .. from .. '!', 'LIMIT', 0, 100)
local reply = {tag, #members == 100 and 1 or 0}
for _, member in ipairs(members) do
  local watch = string.sub(member, #from + 2)
  local owner, text = string.match(redis.call('HGET', watches, watch) or '', '^(%S+) (.*)$')
  if owner == from then
    redis.call('HSET', watches, watch, relay .. ' ' .. text)
    redis.call('ZADD', owners, 0, relay .. ' ' .. watch)
    reply[#reply + 1], reply[#reply + 2] = watch, text
  end
  redis.call('ZREM', owners, member)
end
if reply[2] == 0 then redis.call('ZREM', relays, from) end
return reply
