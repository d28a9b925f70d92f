-- queue: reaping and granting, for the operations that get that far. wire.py puts it where they say `--#include queue`.

local BATCH = 100 -- the most that one call reaps or grants: a long script stops the whole server
local FORGET_MS = 60000 -- how long a lapsed place is remembered, so that a late copy cannot revive it

local function alive(place)
  local lapses = call('ZSCORE', waiters, place)
  lapses = lapses and tonumber(lapses)
  return lapses and lapses > now and lapses
end

local function remove_holder(ticket, weight)
  if call('ZREM', holders, ticket) == 1 then used, excess = used - weight, excess - weight + 1 end
  call('HDEL', state, 't' .. ticket)
end

local function remove_waiter(ticket)
  call('ZREM', queue, ticket)
  call('HDEL', state, 't' .. ticket)
end

-- Counts the excess anew where it can be wrong, as far as one batch allows.
local function count_excess()
  local count = call('ZCARD', holders)
  if excess == 0 or count > BATCH then return end
  used = 0
  for _, ticket in ipairs(call('ZRANGE', holders, 0, -1)) do
    used = used + (parse(call('HGET', state, 't' .. ticket) or '') or 1)
  end
  excess = used - count
end

-- Removes holders whose lease has ended, at most `limit`, and returns how many.
local function reap(limit)
  local lapsed = call('ZRANGEBYSCORE', holders, '-inf', now, 'LIMIT', 0, limit)
  for _, ticket in ipairs(lapsed) do
    remove_holder(ticket, parse(call('HGET', state, 't' .. ticket) or '') or 1)
  end
  count_excess()
  return #lapsed
end

-- Grants from the head of the queue while the next live waiter fits; 1 when the batch ended before the work did.
-- A waiter that does not fit is never passed by a lighter one behind it: light ones could keep it out for ever.
-- The first lease of a grant is what is left of the waiter's place, a deadline its client has set itself.
local function advance()
  if capacity == 0 then return 0 end -- the state was deleted: whoever asks next brings the capacity
  local budget, reaped = BATCH, used >= capacity
  if reaped then budget = budget - reap(budget) end
  while budget > 0 and used < capacity do
    local head = call('ZRANGE', queue, 0, 0)[1]
    if not head then return 0 end
    local text = call('HGET', state, 't' .. head)
    local weight, _, lease, _, place, request, label = parse(text or '')
    local lapses = weight and alive(place)
    if not lapses then
      remove_waiter(head)
    elseif weight > capacity then
      remove_waiter(head)
      tell(place, 'm ' .. request .. ' ' .. capacity)
    elseif used + weight <= capacity then
      -- In this order: while a slot moves to another node a key that is not there cannot be made, and the script ends here.
      make_holder(head, weight, lease, place, request, label, lapses)
      call('ZREM', queue, head)
      tell(place, format('g %s %.0f %.0f %.0f %d', request, fence, now, lapses, capacity))
    elseif not reaped then
      reaped, budget = true, budget + 1 - reap(budget)
    else
      return 0
    end
    budget = budget - 1
  end
  return budget > 0 and 0 or 1
end

-- In how many ms something can lapse that keeps others waiting: the first lease to end and, where there is room that
-- the head of the queue does not fit, the head's own place. -1: nothing can.
local function soonest()
  local first = call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2]
  local at = first and tonumber(first)
  if not first and excess > 0 then return 0 end -- the holders were deleted or evicted alone
  if used < capacity then
    local head = call('ZRANGE', queue, 0, 0)[1]
    local _, _, _, _, place = parse(head and call('HGET', state, 't' .. head) or '')
    if place then
      local lapses = tonumber(call('ZSCORE', waiters, place) or now)
      at = at and math.min(at, lapses) or lapses
    end
  end
  return at and math.max(0, at - now) or -1
end

-- A lease that now ends earlier than the waiters were told: the first of them is to look again.
local function tell_head()
  local head = call('ZRANGE', queue, 0, 0)[1]
  local _, _, _, _, place = parse(head and call('HGET', state, 't' .. head) or '')
  if place then tell(place, 'l 0 ' .. state) end
end

-- A capacity below what some waiter weighs: every client that waits looks through its own.
local function tell_capacity()
  for _, place in ipairs(call('ZRANGE', waiters, 0, BATCH - 1)) do
    if string.sub(place, 1, 1) ~= '!' then tell(place, 'c ' .. capacity .. ' ' .. state) end
  end
end
