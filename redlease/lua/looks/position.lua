-- position: returns where a ticket stands in the queue, and about how long it will wait. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket
-- Reply: {tag, place, wait_ms}
--        (place: 1 is granted next, 0 holds a permit, -1 does neither; of the requests ahead, dead ones before the last 5,000 are
--        counted; wait_ms: what is ahead divided by the capacity, times how long holds lasted of late, and no less than the rates
--        allow; -1 if that is not known)
-- Cost: O(k + log n) with k requests ahead.
local tag, ticket = ARGV[1], ARGV[2]

--#include state
read(ticket)
--#include form
--#include queue
local CHECKED = 50 * BATCH

-- Returns the weight of a live waiter.
local function waits(text)
  local weight, _, _, _, place, request = parse(text or '')
  return weight and lasts(place, request) and weight
end

local deadline = record and call('ZSCORE', holders, ticket)
if deadline and tonumber(deadline) > now then return {tag, 0, 0} end
local key, entry = entry_of(ticket)
local rank, units = record and call('ZRANK', queue, entry), waits(record)
if not rank or not units then return {tag, -1, -1} end
local unchecked = turns.rank and turns.rank(key, entry) or math.max(0, rank - CHECKED)
local place = 1 + unchecked
units = units + unchecked
for _, other in ipairs(turns.count == 0 and rank > 0 and call('ZRANGE', queue, unchecked, rank - 1) or {}) do
  local weight = waits(call('HGET', state, 't' .. other))
  if weight then place, units = place + 1, units + weight end
end
local mean = call('HGET', state, 'h')
local wait = mean and math.ceil(mean * units / capacity) or -1
if rate then -- so many tokens are needed, and the rate gives no more before
  local us = clock[1] * 1000000 + clock[2]
  wait = math.max(wait, 0, math.ceil((math.max(us, rate.tat) - us + (place - rate.burst) * rate.interval) / 1000))
end
if key and turns.interval then wait = math.max(wait, turns.waits(key, entry)) end
return {tag, place, wait}
