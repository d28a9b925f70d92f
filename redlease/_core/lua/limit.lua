-- limit: sets a limit that outranks what processes declare, until it ends or is lifted; or lifts it.
-- KEYS: state holders queue waiters
-- ARGV: tag kind key units until idle_ttl_ms label
--       (kind: "limit" of an operator, "pause", "back" after a vendor's refusal, "each" for each key that has none of its own; key: ""
--       for the whole resource; units: how many may be held, "" lifts the limit; until: so many ms from now, or "@" and a time in ms,
--       or "" for as long as it is not lifted; label: who set it and why, written as in a record)
-- Reply: {tag, deadline, more}
--        (deadline: when the limit ends or, of one that was lifted, would have ended; 0 if there is none, or the time is over already. Of
--        several times after a vendor's refusal the last one counts)
-- Cost: O(log n), and O(log n) for each of at most 16 that it grants.
local tag, kind, key, units, until_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local idle, label = tonumber(ARGV[6]), ARGV[7]
local FOR_GOOD_MS = 315360000000 -- ten years
local name = string.char(255) .. kind .. (key == '' and '' or ' ' .. key)
local is_of_keys = key ~= '' or kind == 'each'

--#include state
read(name)
--#include form
--#include repair
turns.key = is_of_keys and key
--#include queue
for i = 2, 4 do call('ZCARD', KEYS[i]) end -- a key of a wrong type fails here, before the first write
local its_weight = record and parse(record) or 0
local from = is_of_keys and OF_KEYS or 0
local its_end = tonumber(call('ZSCORE', holders, name) or from) - from
local deadline = its_end
if units then
  deadline = string.byte(until_ms) == 64 and tonumber(string.sub(until_ms, 2)) or now + (tonumber(until_ms) or FOR_GOOD_MS)
end
if deadline <= now then return {tag, 0, 0} end
if units and kind == 'back' and its_end >= deadline then return {tag, its_end, 0} end

writes.begin()
if not units then
  remove_holder(name, its_weight)
else
  local weight = is_of_keys and 0 or math.max(0, capacity - units)
  lease_until(name, from + deadline)
  call('HSET', state, 't' .. name, format('%d 0 %d %d - - ', weight, units, now) .. label)
  if its_end > 0 then
    used, excess = used + weight - its_weight, excess + weight - its_weight
  else
    used, excess = used + weight, excess + weight - 1
    if is_of_keys then
      turns.add(name, key, 1, 0)
      turns.limits = turns.limits + 1
    end
  end
  if is_of_keys then turns.look_again(key) end
end
if name == '\255limit' and turns.look_again then turns.look_again('') end
note(units and 'limited' or 'lifted', key, '0', units or 0, 0, label)
if key == '' then publish_to_head() else turns.tell_next(key, 0) end -- it may end before anything else that a client knows of
local more = grant_waiting()
-- The keys need not outlive a limit any more that has been lifted, or ends earlier now.
local others = call('ZCOUNT', holders, '-inf', format('(%d', OF_KEYS))
local last = others > 0 and tonumber(call('ZRANGE', holders, others - 1, others - 1, 'WITHSCORES')[2]) or 0
local last_of_keys = tonumber(call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2] or 0) - OF_KEYS
local last_place = tonumber(call('ZRANGE', waiters, -1, -1, 'WITHSCORES')[2] or 0)
expires = 0
commit(math.max(now, last, last_of_keys, last_place, tombstones, watched), idle)
return {tag, deadline, more}
