-- acquire_usual: what is usual: a new ticket of weight 1, on a resource without state or with the declared capacity unchanged; no tombstone,
-- no watcher, no history, and no expiry of the keys to extend. Written without functions, for speed: the general path, which
-- follows it in acquire.lua, has the same effect.
local was = read_header('fence', 'excess', 'capacity', 'declared', 'sequence', 'expires', 'tombstones', 'watched', 'record', 'history', 'turns', 'rate')
local fence = clock[1] * 1000000 + clock[2]
if is_plain and not was.expires and call('ZCARD', holders) + call('ZCARD', queue) == 0 then
  local deadline, its_fence, since = now + lease, format('%d', fence), format('%d', now)
  local ends = format('%d', now + (lease > idle and lease or idle) + (idle - idle % 64) / 64)
  call('ZADD', holders, format('%d', deadline), ticket)
  call('PEXPIREAT', holders, ends)
  call('HSET', state, 'f', its_fence, 'e', '0', 'c', ARGV[8], 'd', ARGV[8], 'k', ends, 'v', since, 't' .. ticket,
    '1 ' .. its_fence .. ' ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
  call('PEXPIREAT', state, ends)
  return {tag, GRANTED, fence, now, deadline, tonumber(ARGV[8])}
end
if is_plain and not was.record and not was.history and not was.turns and not was.rate and was.declared == ARGV[8] and was.expires and was.expires + 0 >= now + math.max(lease, idle)
  and fence > (was.fence or 0) + 0 and (not was.tombstones or now >= tonumber(was.tombstones)) and (not was.watched or now >= tonumber(was.watched)) then
  -- An excess that is lost, or below zero, is not to be believed, nor a capacity that is lost: see repair.lua.
  local capacity, held, waiting = tonumber(was.capacity), call('ZCARD', holders), call('ZCARD', queue)
  local used = held + (was.excess or -1)
  local since = format('%d', now)
  if waiting == 0 and used >= held and capacity and used < capacity then -- grant
    local deadline, its_fence = now + lease, format('%d', fence)
    call('ZADD', holders, format('%d', deadline), ticket)
    call('PEXPIREAT', holders, was.expires)
    call('HSET', state, 'f', its_fence, 't' .. ticket,
      '1 ' .. its_fence .. ' ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
    return {tag, GRANTED, fence, now, deadline, capacity}
  end
  local first = capacity and used >= capacity and call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2]
  local wait = first and tonumber(first) - now or 0
  local waiter_lease, most = tonumber(ARGV[9]), tonumber(ARGV[10])
  local lapses = wait > 0 and waiter_lease > 0 and call('ZSCORE', waiters, place)
  if lapses and tonumber(lapses) > now and waiting > 0 and was.sequence and ARGV[5] == '0' and (most < 0 or waiting < most)
    and tonumber(was.expires) >= now + waiter_lease then
    -- Queue: no capacity is free, others wait already, the client's place is alive, and the keys outlive it.
    local its_sequence = format('%d', was.sequence + 1)
    call('ZADD', queue, its_sequence, ticket)
    call('ZADD', waiters, 'GT', format('%d', now + waiter_lease), place)
    call('HSET', state, 's', its_sequence, 't' .. ticket,
      '1 0 ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
    return {tag, QUEUED, tonumber(its_sequence), waiting, wait, capacity, 0, 0, now}
  end
end
