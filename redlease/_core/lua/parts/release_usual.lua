-- release_usual: what is usual: the holder's own client releases a live permit of weight 1, and the queue is empty, or its head
-- fits and no further waiter does; no history is kept. Written without functions, for speed: the general path, which follows
-- it in release.lua, has the same effect.
local was = read_header('fence', 'excess', 'capacity', 'expires', 'watched', 'record', 'mean_hold', 'history', 'turns', 'rate')
if was.record and not was.history and not was.turns and not was.rate and tombstone == 0 and not notify and (was.expires or 0) + 0 >= now + idle and (not was.watched or now >= tonumber(was.watched)) then
  -- A request id that begins with "h" belongs to a hold, which must be notified when another client releases its permit.
  local held_fence, held_since = string.match(was.record, '^1 (%d+) %d+ (%d+)')
  local ends = held_fence == its_fence and call('ZSCORE', holders, ticket)
  if its_request == '' and string.match(was.record, '^%d+ %d+ %d+ %d+ %S+ h') then ends = nil end
  if ends and tonumber(ends) > now then
    local waiting = call('ZCARD', queue)
    if waiting == 0 then
      call('ZREM', holders, ticket)
      call('HDEL', state, 't' .. ticket)
      return {tag, 1, 0}
    end
    local excess = (was.excess or -1) + 0 -- if it is lost, or below zero, nothing is granted here: see repair.lua
    local free = (was.capacity or 0) - call('ZCARD', holders) - excess
    local head = call('ZRANGE', queue, 0, 0)[1]
    local lease, channel, epoch, its_request, label =
      string.match(call('HGET', state, 't' .. head) or '', '^1 0 (%d+) %d+ ([^| ]*)(%S+) (%S+) (.*)$')
    local lapses = channel and call('ZSCORE', waiters, channel .. epoch)
    local fence = clock[1] * 1000000 + clock[2]
    if lapses and excess >= 0 and lapses + 0 > now and (free == 0 or (free > 0 and waiting == 1))
      and fence > (was.fence or 0) + 0 and was.expires + 0 >= lapses + 0 then
      local its_fence, since = format('%d', fence), format('%d', now)
      call('ZREM', queue, head)
      call('ZADD', holders, lapses, head)
      call('ZREM', holders, ticket)
      call('HDEL', state, 't' .. ticket)
      call('HSET', state, 'f', its_fence, 't' .. head, '1 ' .. its_fence .. ' ' .. lease .. ' ' .. since .. ' '
        .. channel .. epoch .. ' ' .. its_request .. ' ' .. label,
        'h', (7 * (was.mean_hold or now - held_since) + now - held_since) / 8)
      local message = 'g ' .. its_request .. ' ' .. its_fence .. ' ' .. since .. ' ' .. format('%d', lapses) .. ' ' .. was.capacity
      local is_beside = string.byte(channel) == 58 -- see `publish` in state.lua
      if is_beside then channel = state .. channel end
      if not is_beside or type(redis.pcall('SPUBLISH', channel, message)) == 'table' then
        redis.pcall('PUBLISH', channel, message)
      end
      return {tag, 1, 0}
    end
  end
end
