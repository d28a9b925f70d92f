-- inherit: a relay takes over the watches of one that has lapsed, or reads its own again.
-- KEYS: watches owners relays
-- ARGV: tag relay from
--       (from = relay: its own, at most 10000 of them)
-- Reply: {tag, more, watch, text, ...}; more 1 when there are further ones: at most 100 are taken over a call
-- Cost: O(log n) for each watch.
local tag, relay, from = ARGV[1], ARGV[2], ARGV[3]
local watches, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local own = relay == from
if not own and tonumber(redis.call('ZSCORE', relays, from) or 0) > now then return {tag, 0} end
local most = own and 10000 or 100
-- "!" comes right after the space that ends a relay's name.
local members = redis.call('ZRANGEBYLEX', owners, '[' .. from .. ' ', '(' .. from .. '!', 'LIMIT', 0, most)
local reply = {tag, (not own and #members == most) and 1 or 0}
for _, member in ipairs(members) do
  local watch = string.sub(member, #from + 2)
  local had = redis.call('HGET', watches, watch)
  local owner, text = string.match(had or '', '^(%S+) (.*)$')
  if owner == from then
    if not own then
      redis.call('HSET', watches, watch, relay .. ' ' .. text)
      redis.call('ZADD', owners, 0, relay .. ' ' .. watch)
    end
    reply[#reply + 1], reply[#reply + 2] = watch, text
  end
  if not own or owner ~= from then redis.call('ZREM', owners, member) end
end
if not own and reply[2] == 0 then redis.call('ZREM', relays, from) end
return reply
