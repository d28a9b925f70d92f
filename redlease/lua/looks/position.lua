-- position: returns where a ticket stands in the queue, and about how long it will wait. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket
-- Reply: {tag, place, wait_ms}
--        (place: 1 is granted next, 0 holds a permit, -1 does neither; of more than 40 requests ahead a sample tells how many are
--        alive, and how heavy they are; wait_ms: what is ahead divided by the capacity, times how long holds lasted of late, and no
--        less than the rates allow; -1 if that is not known)
-- Cost: O(log n).
local tag, ticket = ARGV[1], ARGV[2]

--#include state
read(ticket)
--#include form
--#include queue
local SAMPLE = 40 -- of so many requests ahead each one is looked at

-- Returns the weight of a live waiter.
local function waits(text)
  local weight, place, request = string.match(text or '', '^(%d+) %d+ %d+ %d+ (%S+) (%S+)')
  return weight and lasts(place, request) and tonumber(weight)
end

local deadline = record and call('ZSCORE', holders, ticket)
if deadline and tonumber(deadline) > now then return {tag, 0, 0} end
local key, entry = entry_of(ticket)
local rank, units = record and call('ZRANK', queue, entry), waits(record)
if not rank or not units then return {tag, -1, -1} end
local ahead = turns.rank and turns.rank(key, entry) or rank
local place = 1 + ahead
if turns.count > 0 then
  units = units + ahead -- in what order the turns of keys come is a guess anyway
elseif ahead > 0 then
  local live, weights, looked = 0, 0, math.min(ahead, SAMPLE)
  for i = 0, looked - 1 do
    local at = math.floor(i * ahead / looked)
    local weight = waits(call('HGET', state, 't' .. call('ZRANGE', queue, at, at)[1]))
    if weight then live, weights = live + 1, weights + weight end
  end
  place, units = 1 + math.floor(live * ahead / looked + 0.5), units + weights * ahead / looked
end
local mean = call('HGET', state, 'h')
local wait = mean and math.ceil(mean * units / capacity) or -1
if rate then -- so many tokens are needed, and the rate gives no more before
  local us = clock[1] * 1000000 + clock[2]
  wait = math.max(wait, 0, math.ceil((math.max(us, rate.tat) - us + (place - rate.burst) * rate.interval) / 1000))
end
if key and turns.interval then wait = math.max(wait, turns.waits(key, entry)) end
return {tag, place, wait}
