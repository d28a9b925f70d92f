-- inherit: makes a relay the owner of records of a lapsed relay.
-- KEYS: records owners relays
-- ARGV: tag relay from records
--       (records: their ids, separated by spaces, at most 100)
-- Reply: {tag, text, ...}; of the records that the lapsed relay still owned
-- Cost: O(log n) for each record.
local tag, relay, from = ARGV[1], ARGV[2], ARGV[3]
local records, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

if tonumber(redis.call('ZSCORE', relays, from) or 0) > now then return {tag} end
local reply = {tag}
for record in string.gmatch(ARGV[4], '%S+') do
  local owner, text = string.match(redis.call('HGET', records, record) or '', '^(%S+) (.*)$')
  if owner == from then
    redis.call('HSET', records, record, relay .. ' ' .. text)
    redis.call('ZADD', owners, 0, relay .. ' ' .. record)
    redis.call('ZREM', owners, from .. ' ' .. record)
    reply[#reply + 1] = text
  end
end
-- "!" sorts right after the space that ends a relay's name.
local left = redis.call('ZRANGEBYLEX', owners, '[' .. from .. ' ', '(' .. from .. '!', 'LIMIT', 0, 1)
if #left == 0 then redis.call('ZREM', relays, from) end
return reply
