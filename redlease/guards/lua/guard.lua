-- guard: refuses a fence lower than the highest seen, records any other, and then runs the user's script, if there is one.
-- redis.py puts `local theirs` before it, for a run with a function around the user's script. That script is to find its own
-- keys and arguments in KEYS and ARGV, so the guard's come last and are removed before it runs.
-- KEYS: guard
-- ARGV: fence idle_ttl_ms tag
-- Reply: {tag, 1, reply} if accepted; {tag, 0, seen} if stale; {tag, -1, error} if accepted and the user's script failed
-- Cost: O(1), and what the user's script costs.
local tag = table.remove(ARGV)
local idle = tonumber(table.remove(ARGV))
local fence = table.remove(ARGV)
local guard = table.remove(KEYS)
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local seen = redis.call('GET', guard)
if seen and tonumber(seen) > tonumber(fence) then return {tag, 0, seen} end
-- A repeated fence is written too, so that a server which may not write accepts none. The text is stored as it came: Lua would
-- round a number to 14 digits.
redis.call('SET', guard, fence, 'KEEPTTL')
local left = redis.call('PTTL', guard)
local expires = math.max(now, math.floor(tonumber(fence) / 1000)) + idle
if left < 0 or now + left < expires then redis.call('PEXPIREAT', guard, string.format('%d', expires)) end

if not theirs then return {tag, 1} end
local done, reply = pcall(theirs)
local failure = type(reply) == 'table' and reply.err or not done and tostring(reply)
if failure then return {tag, -1, failure} end
return {tag, 1, reply}
