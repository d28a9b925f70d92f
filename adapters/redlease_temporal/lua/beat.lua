-- beat: a relay says that it lives, and hears which others do not. One that leaves is at once taken for lapsed.
-- KEYS: watches owners relays
-- ARGV: tag relay lease_ms keep_ms channel generation
--       (lease_ms 0: it leaves; generation: of the registry, should it have none: one whose data was lost gets a new one)
-- Reply: {tag, generation, fresh, soonest, lapsed...}; fresh 1 when its watches may have gone to others meanwhile; soonest: in how many
--        ms another relay lapses unless it says that it lives, -1 when there is none; lapsed: at most 10 relays
-- Cost: O(log n) with n relays.
local tag, relay, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local watches, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local was = redis.call('ZSCORE', relays, relay)
local fresh = (not was or tonumber(was) <= now) and 1 or 0
redis.call('ZADD', relays, string.format('%d', lease > 0 and now + lease or now - 1), relay)
redis.call('HSETNX', watches, '!', ARGV[6])
local generation = redis.call('HGET', watches, '!')
for i = 1, 3 do redis.call('PEXPIREAT', KEYS[i], string.format('%d', now + tonumber(ARGV[4]))) end
if lease == 0 then
  redis.pcall('PUBLISH', ARGV[5], 'left')
  return {tag, generation, fresh, -1}
end
local reply = {tag, generation, fresh, -1}
local ahead = redis.call('ZRANGEBYSCORE', relays, string.format('(%d', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
for i = 1, #ahead, 2 do
  if ahead[i] ~= relay and reply[4] < 0 then reply[4] = tonumber(ahead[i + 1]) - now end
end
for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', relays, '-inf', now, 'LIMIT', 0, 10)) do
  reply[#reply + 1] = lapsed
end
return reply
