-- release: removes a ticket, as holder or as waiter, and grants the freed capacity to the queue.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket request fence tombstone_ms notify idle_ttl_ms
--       (fence given: only a holder with that fence; else request given: only that request, and the ticket if no other
--       request shares it; neither: any. Other requests that share a removed ticket are notified; tombstone_ms > 0: late
--       copies of that request grant nothing; notify 1: notify the client whose ticket it was; ticket "": only continue
--       the work that a call left at its batch limit)
-- Reply: {tag, released, more}; released 1 if a live permit or place was removed, else 0
-- Cost: O(log n), and O(log n) for each of at most 16 that it grants.
local tag, ticket, its_request, its_fence = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local tombstone, notify, idle = tonumber(ARGV[5]), ARGV[6] == '1', tonumber(ARGV[7])

--#include release_usual
--#include state
read(ticket)
--#include form
--#include repair
--#include queue
--#include share
-- Read before the first write: after that a key of a wrong type can no longer stop the script.
local queued = was.waiting
if queued > 0 or tombstone > 0 then call('ZCARD', waiters) end
local released, lasted = 0, nil
local changed = ticket == '' and expires > 0

-- Sets a tombstone: late copies of that request grant nothing.
local function bury(request)
  writes.begin()
  call('ZADD', waiters, format('%d', -(now + tombstone)), '!' .. request)
  tombstones = math.max(tombstones, now + tombstone)
  set('x', format('%d', tombstones))
  new_waiter, changed = true, true
end

local weight, held_fence, _, since, place, request, label = parse(record or '')
if weight then
  local hit = (its_fence == held_fence or '0' .. its_fence == held_fence) and held_fence ~= '0'
  if its_fence == '' then
    local was_there, rest = share.left(record, its_request)
    hit = its_request == '' or (was_there and not rest)
    if was_there and rest then -- other requests share the ticket and keep it
      -- The rest may be dead: a full queue is looked through anew. Allowed when out of memory, and so are later writes.
      writes.begin()
      call('HDEL', state, held_fence == '0' and 'l' or '')
      local key = entry_of(ticket)
      if key then turns.keys = turns.keys - call('HDEL', state, 'l' .. key) end
      call('HSET', state, 't' .. ticket, rest) -- at once: a grant below reads it
      changed = true
    end
  end
  if hit then
    if held_fence ~= '0' then
      local deadline = tonumber(call('ZSCORE', holders, ticket) or 0)
      if deadline > now then
        local replaced = string.find(held_fence, '^0.')
        released, lasted = 1, now - since
        remove_holder(ticket, weight, replaced)
        note(notify and 'forced' or 'released', ticket, held_fence, weight, lasted, label)
      else
        lapse(ticket, weight, deadline, held_fence)
      end
    else
      call('ZCARD', holders)
      if lasts(place, request) then released = 1 end
      remove_waiter(ticket)
      if notify then note('forced', ticket, '0', weight, now - since, label) end
    end
    -- A permit that was acquired as data and is not shared has no listener, so there is nobody to notify.
    if notify or string.find(request, '^h') or string.find(request, '{', 1, true) then
      publish_to_sharers(place, request, 'x', '', its_request)
    end
    if its_request == '' and tombstone > 0 then
      for other in string.gmatch('}' .. request, '}([^{]*)') do bury(other) end
    end
    changed = true
  end
elseif ticket ~= '' and (its_fence ~= '' or its_request == '') then -- its record was lost, see parts/repair.lua
  for _, name in ipairs({ticket, '\255?' .. ticket}) do
    local deadline = tonumber(call('ZSCORE', holders, name) or 0)
    if deadline > 0 then
      remove_holder(name, 1)
      released, changed = deadline > now and 1 or released, true
    end
  end
  local _, entry = entry_of(ticket)
  if its_fence == '' and call('ZSCORE', queue, entry) then -- another loss may outweigh that of its record, so that no repair has found it
    remove_waiter(ticket)
    released, changed = 1, true
  end
end
if tombstone > 0 and its_request ~= '' then bury(its_request) end
if tombstones > now then share.forget() end
local more = 0
if changed then
  if queued > 0 then
    if lasted then set('h', (7 * (call('HGET', state, 'h') or lasted) + lasted) / 8) end
    more = grant_waiting()
  end
  commit(math.max(now, tombstones), idle)
end
return {tag, released, more}
