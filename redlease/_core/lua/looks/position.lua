-- position: returns where a ticket stands in the queue, and about how long it will wait. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket
-- Reply: {tag, place, wait_ms}
--        (place: 1 is granted next, 0 holds a permit, -1 does neither; of more than 40 requests ahead a sample tells how many are
--        alive, and how heavy they are; wait_ms: what is ahead divided by the units that operators allow, times how long holds lasted of late,
--        and no less than its key and the rates allow; -1 if that is not known)
-- Cost: O(log n).
local tag, ticket = ARGV[1], ARGV[2]

--#include state
read(ticket)
--#include form
--#include queue
local SAMPLE = 40 -- of so many requests ahead each one is looked at
local LONGEST_MS = 157680000000 -- five years: a limit without an end is kept for ten

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
local place, own_units
if key then
  local own, others, their_weight = turns.ahead(key, entry, units)
  own_units, place = (own + 1) * units, 1 + math.floor(own + others + 0.5)
  units = own_units + others * their_weight
elseif turns.count > 0 then
  local ahead = turns.rank(key, entry)
  place, units = 1 + ahead, units + ahead -- in what order the turns of keys come is a guess anyway
else
  local live, weights, looked = 0, 0, math.min(rank, SAMPLE)
  for i = 0, looked - 1 do
    local at = math.floor(i * rank / looked)
    local weight = waits(call('HGET', state, 't' .. call('ZRANGE', queue, at, at)[1]))
    if weight then live, weights = live + 1, weights + weight end
  end
  if rank == 0 then looked = 1 end
  place, units = 1 + math.floor(live * rank / looked + 0.5), units + weights * rank / looked
end

-- Returns for how long nothing is granted, how many units may be held after that, and when all may.
local function allowed()
  local paused, most, ends = 0, capacity, now
  for _, kind in ipairs({'pause', 'back', 'limit'}) do
    local its_end = tonumber(call('ZSCORE', holders, '\255' .. kind) or 0)
    local its_units = its_end > now and tonumber(string.match(call('HGET', state, 't\255' .. kind) or '', '^%d+ 0 (%d+)') or nil)
    if its_units == 0 then
      paused = math.max(paused, its_end - now)
    elseif its_units then
      most, ends = math.min(capacity, its_units), its_end
    end
  end
  return paused, most, ends
end

local mean = tonumber(call('HGET', state, 'h') or nil)
local wait = -1
if mean then
  local paused, most, ends = allowed()
  local rest = math.max(0, ends - now - paused)
  wait = mean * units / most
  if most < capacity and wait > rest then wait = rest + (wait - rest) * most / capacity end
  wait = paused + wait
  if key then
    local its_most, held_back = turns.allowed(key)
    wait = math.max(wait, held_back + (its_most and mean * own_units / math.max(1, its_most) or 0))
  end
  wait = wait < LONGEST_MS and math.ceil(wait) or -1 -- of what has no end of its own nobody knows it
end
if rate then -- so many tokens are needed, and the rate gives no more before
  local us = clock[1] * 1000000 + clock[2]
  wait = math.max(wait, 0, math.ceil((math.max(us, rate.tat) - us + (place - rate.burst) * rate.interval) / 1000))
end
if key and turns.interval then wait = math.max(wait, turns.waits(key, entry)) end
return {tag, place, wait}
