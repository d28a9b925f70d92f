-- release: takes a ticket out, as holder or as waiter, and hands on what it held.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket fence request tombstone_ms notify idle_ttl_ms
--       (fence given: only a holder with that fence; else request given: only the ticket of that request; neither: any;
--       tombstone_ms > 0: later copies of that request grant nothing; notify 1: tell the client whose ticket it was;
--       ticket "": only goes on with what a batch left)
-- Reply: {tag, released, more}; released 1 when a live permit or place was taken out, else 0
-- Cost: O(log n), and for each of at most 100 that it grants.
local tag, ticket, its_fence, its_request = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local tombstone, notify, idle = tonumber(ARGV[5]), ARGV[6] == '1', tonumber(ARGV[7])

--#include queue
read(ticket)
-- Read before the first write: from here on no key can turn out to be of a wrong type.
local queued = call('ZCARD', queue)
if queued > 0 or tombstone > 0 then call('ZCARD', waiters) end
local released = 0
local changed = ticket == '' and expires > 0
if record then
  local weight, held_fence, _, _, place, request = parse(record)
  local hit
  if its_fence ~= '' then hit = its_fence == held_fence else hit = its_request == '' or its_request == request end
  if hit then
    if held_fence ~= '0' then
      local deadline = call('ZSCORE', holders, ticket)
      if deadline and tonumber(deadline) > now then released = 1 end
      remove_holder(ticket, weight)
    else
      call('ZCARD', holders)
      if alive(place) then released = 1 end
      remove_waiter(ticket)
    end
    if notify then tell(place, 'x ' .. request) end
    if its_request == '' then its_request = request end
    changed = true
  end
end
if tombstone > 0 and its_request ~= '' then
  call('PEXPIREAT', state, format('%d', expires)) -- allowed on a full server, and so is the rest
  call('ZADD', waiters, format('%d', now + tombstone), '!' .. its_request)
  tombstones = math.max(tombstones, now + tombstone)
  set('x', format('%d', tombstones))
  new_waiter = true
  changed = true
end
local more = 0
if changed then
  if queued > 0 then more = advance() end
  settle(math.max(now, tombstones), idle)
end
return {tag, released, more}
