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

-- What is usual: a live permit of weight 1, given back by the client that has it; and behind it nobody, or somebody who
-- fits and after whom nobody else does.
local was = call('HMGET', state, 'f', 'e', 'c', 'k', 'w', 't' .. ticket)
if was[6] and tombstone == 0 and not notify and tonumber(was[4] or 0) >= now + idle and now >= tonumber(was[5] or 0) then
  local ends = string.match(was[6], '^1 (%d+)') == its_fence and call('ZSCORE', holders, ticket)
  if ends and tonumber(ends) > now then
    local waiting = call('ZCARD', queue)
    if waiting == 0 then
      call('ZREM', holders, ticket)
      call('HDEL', state, 't' .. ticket)
      return {tag, 1, 0}
    end
    local free = was[3] - call('ZCARD', holders) - (was[2] or 0)
    local head = call('ZRANGE', queue, 0, 0)[1]
    local lease, channel, epoch, its_request, label =
      string.match(call('HGET', state, 't' .. head) or '', '^1 0 (%d+) %d+ ([^| ]*)(%S+) (%S+) (.*)$')
    local lapses = channel and call('ZSCORE', waiters, channel .. epoch)
    local fence = clock[1] * 1000000 + clock[2]
    if lapses and tonumber(lapses) > now and (free == 0 or (free > 0 and waiting == 1))
      and fence > tonumber(was[1]) and tonumber(was[4]) >= tonumber(lapses) then
      local its_fence, since = format('%d', fence), format('%d', now)
      call('ZREM', queue, head)
      call('ZADD', holders, lapses, head)
      call('ZREM', holders, ticket)
      call('HDEL', state, 't' .. ticket)
      call('HSET', state, 'f', its_fence, 't' .. head, '1 ' .. its_fence .. ' ' .. lease .. ' ' .. since .. ' '
        .. channel .. epoch .. ' ' .. its_request .. ' ' .. label)
      local message = 'g ' .. its_request .. ' ' .. its_fence .. ' ' .. since .. ' ' .. format('%d', lapses) .. ' ' .. was[3]
      local is_beside = string.byte(channel) == 58 -- see `tell` in state.lua
      if is_beside then channel = state .. channel end
      if not is_beside or type(redis.pcall('SPUBLISH', channel, message)) == 'table' then
        redis.pcall('PUBLISH', channel, message)
      end
      return {tag, 1, 0}
    end
  end
end

--#include state
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
