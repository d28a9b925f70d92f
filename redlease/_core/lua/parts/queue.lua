-- queue: reaping and granting, for the operations that need it. scripts.py puts it where they say `--#include queue`.

-- A long script keeps the whole server from all others, so a call does no more than this, and tells that there is more to do.
local BATCH = 100 -- how many entries it takes up at most of those that cost a command or two
local left = 16 -- how many more it may reap, remove or grant, with what follows from that; one counts as one more for each 2,048 bytes
local OF_KEYS = 4503599627370496 -- 2^52: limits of keys stand above it among the holders, with it added to the time, see turns.lua
local FORGET_MS = 60000 -- how long a lapsed place is kept, so that a late copy cannot revive it

-- Returns the key of a ticket, if it has one, its entry in the queue, its share and its sequence.
local function entry_of(ticket)
  if turns.of then return turns.of(ticket) end
  return nil, ticket
end

local function ticket_of(entry)
  return entry and turns.ticket and turns.ticket(entry) or entry
end

-- Returns the waiter that is granted next, its entry, and with keys its tag and its key.
local function first_waiter()
  if turns.first then return turns.first() end
  local head = call('ZRANGE', queue, 0, 0)[1]
  return head, head
end

local function alive(place)
  local lapses = call('ZSCORE', waiters, place)
  lapses = lapses and tonumber(lapses)
  return lapses and lapses > now and lapses
end

-- Returns when the place of a waiter lapses; for a shared ticket, when the last of its places lapses.
local function lasts(place, request)
  local last = alive(place)
  if string.find(request, '{', 1, true) then
    for other in string.gmatch(request, '{([^}]*)}') do
      local lapses = alive(other)
      if lapses and (not last or lapses > last) then last = lapses end
    end
  end
  return last
end

-- Publishes to the clients of all requests that share a ticket, except the request `but`; grants once they are stored.
local function publish_to_sharers(place, request, kind, rest, but)
  local send, first = kind == 'g' and writes.add_grant or publish, string.match(request, '^[^{]*')
  if first ~= but then send(place, kind .. ' ' .. first .. rest) end
  for other, its_request in string.gmatch(request, '{([^}]*)}([^{]*)') do
    if its_request ~= but then send(other, kind .. ' ' .. its_request .. rest) end
  end
end

-- `replaced`: a newer request has replaced the permit, so its units are for the next waiter of its key.
local function remove_holder(ticket, weight, replaced)
  writes.begin()
  if call('ZREM', holders, ticket) == 1 then used, excess = used - weight, excess - weight + 1 end
  call('HDEL', state, 't' .. ticket)
  local key = entry_of(ticket)
  if key then
    turns.use(key, -weight)
    turns.remove(ticket)
    if weight == 0 then turns.lifted(key) end
  end
  if replaced and turns.lead then turns.lead(key) end
end

-- Removes a holder whose lease has ended. With a lock delay its units stay in use for that long after it, held under a name of
-- their own, which begins with a byte that no ticket, being UTF-8, contains.
local function lapse(ticket, weight, ended, its_fence)
  writes.begin()
  if was.history and string.byte(ticket) ~= 255 then
    local _, fence_of_it, _, since, _, _, label = parse(call('HGET', state, 't' .. ticket) or '')
    if fence_of_it then note('lost', ticket, fence_of_it, weight, ended - since, label) end
  end
  local until_ms = ended + tonumber(call('HGET', state, 'y') or 0)
  if until_ms > now and string.byte(ticket) ~= 255 then
    local name = string.char(255) .. format('%d ', ended) .. ticket
    call('HSET', state, 't' .. name, format('%d 0 0 %d - - ', weight, now))
    lease_until(name, until_ms)
    used, excess = used + weight, excess + weight - 1
    local key, _, share = entry_of(ticket)
    if key then -- before the permit goes, so that nothing of its key becomes free meanwhile
      turns.add(name, key, share, 0)
      turns.use(key, weight)
    end
  end
  remove_holder(ticket, weight, its_fence and string.find(its_fence, '^0.'))
  if ticket == '\255limit' and turns.look_again then turns.look_again('') end
end

-- Removes holders whose lease has ended, and limits of keys.
local function reap()
  local lapsed = call('ZRANGEBYSCORE', holders, '-inf', now, 'WITHSCORES', 'LIMIT', 0, BATCH)
  for i = 1, #lapsed, 2 do
    if left <= 0 then break end
    local text = call('HGET', state, 't' .. lapsed[i]) or ''
    local weight, its_fence = parse(text)
    left = left - 1 - #text / 2048
    lapse(lapsed[i], weight or 1, tonumber(lapsed[i + 1]), its_fence)
  end
  if left > 0 and turns.limits and turns.limits > 0 then
    for _, name in ipairs(call('ZRANGEBYSCORE', holders, format('%d', OF_KEYS), format('%d', OF_KEYS + now), 'LIMIT', 0, BATCH)) do
      if left <= 0 then break end
      left = left - 1
      remove_holder(name, 0)
    end
  end
end

-- Notifies a waiter, if there is one, that an expiry, so many ms from now, comes earlier than its client expects.
local function publish_expiry(ticket, ms)
  local _, _, _, _, place, request = parse(ticket and call('HGET', state, 't' .. ticket) or '')
  if place then publish_to_sharers(place, request, 'l', format(' %d', ms)) end
end

-- Notifies the first waiter.
local function publish_to_head()
  publish_expiry(first_waiter() or ticket_of(call('ZRANGE', queue, 0, 0)[1]), 0)
end

-- Returns when the next token is due, if there is none now.
local function token_due()
  local ends = rate and call('ZSCORE', holders, string.char(255) .. 'rate')
  return ends and tonumber(ends) > now and tonumber(ends)
end

-- Returns the ms until an expiry can let that waiter proceed, of what `soonest` returned; -1 if none can. While there is no token,
-- only who is granted next calls when it is due.
local function told(wait, ticket)
  local key, entry = entry_of(ticket)
  local by_key = key and turns.told(key, entry)
  if by_key then return by_key end
  local due = token_due()
  if not due then return wait end
  return ticket == first_waiter() and due - now or -1
end

local function remove_waiter(ticket, entry)
  writes.begin()
  if turns.leave then turns.leave(ticket, entry) else call('ZREM', queue, entry or ticket) end
  call('HDEL', state, 't' .. ticket)
  was.waiting = was.waiting - 1
end

-- Grants from the head of the queue while the next live waiter fits; returns 1 if there is more to do than one call may.
-- A waiter that does not fit is never passed by a lighter one behind it: light ones could starve it.
-- A grant starts with the time left on the waiter's place, a deadline that its client knows.
local function grant_waiting()
  if capacity == 0 then return 0 end -- the state was deleted: the next acquire declares the capacity
  local reaped = used >= capacity
  if reaped then reap() end
  if turns.raised ~= 0 and used < capacity then turns.raise() end
  while left > 0 and used < capacity do
    if was.waiting <= 0 then return 0 end -- a queue that has become empty cannot be touched while its slot moves
    local head, entry, tag, key = first_waiter()
    if not head and turns.raised == 0 and (reaped or turns.count == 0 or call('ZCARD', queue) == 0) then return 0 end
    local text = head and call('HGET', state, 't' .. head)
    local weight, _, lease, since, place, request, label = parse(text or '')
    local lapses = weight and lasts(place, request)
    left = left - 1 - #(text or '') / 2048
    if not head and turns.raised ~= 0 then -- keys that were not looked at yet may have one
      turns.raise()
    elseif not head then -- all who wait are of keys at their limits, maybe by holders whose leases have ended
      reaped = true
      reap()
    elseif not lapses then
      remove_waiter(head, entry)
    elseif weight > capacity or (key and turns.is_heavy(key, weight)) then
      remove_waiter(head)
      publish_to_sharers(place, request, 'm', ' ' .. (weight > capacity and capacity or turns.limit))
    elseif key and turns.park(entry, key, weight) then -- it is the next key's turn
    elseif used + weight <= capacity then
      writes.begin()
      make_holder(head, weight, lease, place, request, label, lapses, since)
      if turns.count > 0 then turns.take(entry, tag, key, weight) else call('ZREM', queue, entry) end
      was.waiting = was.waiting - 1
      publish_to_sharers(place, request, 'g', format(' %.0f %.0f %.0f %d', fence, now, lapses, capacity))
    elseif not reaped then
      reaped = true
      reap()
    elseif turns.raised ~= 0 then -- a key that was not looked at yet may go before the head
      turns.raise()
    else
      return 0
    end
  end
  return left > 0 and 0 or 1
end

-- Returns the ms until an expiry can let a waiter proceed: of the first lease or, if capacity is free but too small for
-- the head of the queue, of the head's own place. -1: there is none. The end of a limit of a key is for its waiters alone, see `told`.
local function soonest()
  local first = call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2]
  local at = first and tonumber(first) < OF_KEYS and tonumber(first)
  if used < capacity then
    local head = first_waiter()
    local _, _, _, _, place, request = parse(head and call('HGET', state, 't' .. head) or '')
    if place then
      local lapses = lasts(place, request) or now
      at = at and math.min(at, lapses) or lapses
    end
  end
  return at and math.max(0, at - now) or -1
end

-- Where there is a rate, notifies who is granted next if it is another than before, or a new wait for a token begins: nobody else
-- knows when to call. Field o has who it was.
tell_first = function()
  local is_new = rate and rate.due
  if is_new then rate.due = nil end
  if not (rate or (turns.interval and turns.count > 0)) then return end
  local first, was_first = first_waiter(), call('HGET', state, 'o')
  if was_first and not first then call('HDEL', state, 'o') end
  if not first or (not is_new and first == was_first) then return end
  call('HSET', state, 'o', first)
  local wait = first ~= replied_to and told(soonest(), first) or -1
  if wait >= 0 then publish_expiry(first, wait) end
end

-- Returns whether an expiry may have let a waiter proceed, of what `soonest` returned, or the end of a limit of a key.
local function is_due(wait)
  if wait == 0 or not turns.limits or turns.limits == 0 then return wait == 0 end
  return call('ZCOUNT', holders, format('%d', OF_KEYS), format('%d', OF_KEYS + now)) > 0
end

-- Notifies the clients with waiters of a smaller capacity, so that each fails its requests that no longer fit.
local function publish_capacity()
  for _, place in ipairs(call('ZRANGEBYSCORE', waiters, '(' .. format('%d', now), '+inf', 'LIMIT', 0, BATCH)) do
    if string.sub(place, 1, 1) ~= '!' then publish(place, 'c ' .. capacity .. ' ' .. state) end
  end
end
