-- beat: renews a relay's lease and returns the relays whose lease has expired. Lease 0 ends the relay's own at once.
-- KEYS: records owners relays
-- ARGV: tag relay lease_ms keep_ms channel generation skipped
--       (lease_ms 0: it leaves; generation: for a registry that has none, so that lost data gets a new one;
--       skipped: lapsed relays to leave out of the reply, separated by spaces)
-- Reply: {tag, generation, fresh, soonest, lapsed...}; fresh 1 if others may have taken over its records; soonest: ms until the
--        next lease of another relay expires, -1 if there is none; lapsed: at most 10 relays
-- Cost: O(log n) with n relays, and O(1) for each one skipped.
local tag, relay, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local records, owners, relays = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local was = redis.call('ZSCORE', relays, relay)
local fresh = (not was or tonumber(was) <= now) and 1 or 0
redis.call('ZADD', relays, string.format('%d', lease > 0 and now + lease or now - 1), relay)
redis.call('HSETNX', records, '!', ARGV[6])
local generation = redis.call('HGET', records, '!')
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
local skipped, count = {}, 10
for name in string.gmatch(ARGV[7], '%S+') do skipped[name], count = true, count + 1 end
for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', relays, '-inf', now, 'LIMIT', 0, count)) do
  if not skipped[lapsed] and #reply < 14 then reply[#reply + 1] = lapsed end
end
return reply
