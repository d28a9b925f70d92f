-- acquire_usual: what is usual: a new ticket of weight 1, on a resource without state or with the declared capacity unchanged; no tombstone,
-- no watcher, no history, and no expiry of the keys to extend. Written without functions, for speed: the general path, which
-- follows it in acquire.lua, has the same effect.
local was = call('HMGET', state, 'f', 'e', 'c', 'd', 's', 'k', 'x', 'w', 't' .. ticket, 'n', 'g', 'r')
local fence = clock[1] * 1000000 + clock[2]
if is_plain and not was[6] and call('ZCARD', holders) + call('ZCARD', queue) == 0 then
  local deadline, its_fence, since = now + lease, format('%d', fence), format('%d', now)
  local ends = format('%d', now + math.max(lease, idle) + idle / 64)
  call('ZADD', holders, format('%d', deadline), ticket)
  call('PEXPIREAT', holders, ends)
  call('HSET', state, 'f', its_fence, 'e', '0', 'c', ARGV[8], 'd', ARGV[8], 'k', ends, 'v', since, 't' .. ticket,
    '1 ' .. its_fence .. ' ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
  call('PEXPIREAT', state, ends)
  return {tag, GRANTED, fence, now, deadline, tonumber(ARGV[8])}
end
if is_plain and not was[9] and not was[10] and not was[11] and not was[12] and was[4] == ARGV[8] and was[6] and was[6] + 0 >= now + math.max(lease, idle)
  and fence > (was[1] or 0) + 0 and (not was[7] or now >= tonumber(was[7])) and (not was[8] or now >= tonumber(was[8])) then
  -- An excess that is lost, or below zero, is not to be believed, nor a capacity that is lost: see repair.lua.
  local capacity, held, waiting = tonumber(was[3]), call('ZCARD', holders), call('ZCARD', queue)
  local used = held + (was[2] or -1)
  local since = format('%d', now)
  if waiting == 0 and used >= held and capacity and used < capacity then -- grant
    local deadline, its_fence = now + lease, format('%d', fence)
    call('ZADD', holders, format('%d', deadline), ticket)
    call('PEXPIREAT', holders, was[6])
    call('HSET', state, 'f', its_fence, 't' .. ticket,
      '1 ' .. its_fence .. ' ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
    return {tag, GRANTED, fence, now, deadline, capacity}
  end
  local first = capacity and used >= capacity and call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2]
  local wait = first and tonumber(first) - now or 0
  local waiter_lease, most = tonumber(ARGV[9]), tonumber(ARGV[10])
  local lapses = wait > 0 and waiter_lease > 0 and call('ZSCORE', waiters, place)
  if lapses and tonumber(lapses) > now and waiting > 0 and was[5] and ARGV[5] == '0' and (most < 0 or waiting < most)
    and tonumber(was[6]) >= now + waiter_lease then
    -- Queue: no capacity is free, others wait already, the client's place is alive, and the keys outlive it.
    local its_sequence = format('%d', was[5] + 1)
    call('ZADD', queue, its_sequence, ticket)
    call('ZADD', waiters, 'GT', format('%d', now + waiter_lease), place)
    call('HSET', state, 's', its_sequence, 't' .. ticket,
      '1 0 ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
    return {tag, QUEUED, tonumber(its_sequence), waiting, wait, capacity, 0, 0, now}
  end
end
