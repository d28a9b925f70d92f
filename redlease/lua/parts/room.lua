-- room: refuses a request that finds too many waiters, of its key or in all; acquire includes it in the branch of those that queue.
-- Only live ones count. The queue may contain dead ones behind its head if a place has lapsed since the last full check; one call
-- checks a part of the queue.
local at = math.abs(arrival)

-- Removes the dead of these waiters until there is room.
local function bury(entries, is_full)
  for _, entry in ipairs(entries) do
    local other = ticket_of(entry)
    local _, _, _, _, its_place, its_request = parse(call('HGET', state, 't' .. other) or '')
    if its_place and lasts(its_place, its_request) then
      at = at + 1
    else
      remove_waiter(other, entry)
      if at < before then before = before - 1 end
      ahead, more = call('ZCARD', queue), 1 -- with it may have gone others of its key
      if not is_full() then break end
    end
  end
  if turns.store then
    turns.store()
    wait = soonest() -- another waiter of a key may be the first
  end
end

if most_of_key and turns.waiting(key) >= most_of_key then
  bury(turns.waiters(key, at, 10 * BATCH), function() return turns.waiting(key) >= most_of_key end)
  local waiting = turns.waiting(key)
  tell_first()
  if waiting >= most_of_key then return {tag, FULL, waiting, at < waiting and at or 0, 1} end
  at, arrival = 0, 0
end
if most >= 0 and ahead >= most then
  local looked = tonumber(call('HGET', state, 'l') or 0)
  if call('ZCOUNT', waiters, format('(%d', looked), now) > 0 then
    bury(call('ZRANGE', queue, at, at + 10 * BATCH - 1), function() return ahead >= most end)
    if arrival == 0 and at >= ahead then call('HSET', state, 'l', format('%d', now)) end
  else
    at = ahead
  end
  tell_first()
  if ahead >= most then return {tag, FULL, ahead, at < ahead and at or 0} end
end
