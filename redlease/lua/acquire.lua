-- acquire: asks for a permit; a repeated request finds its permit, with its lease full again, or its place.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket request place arrival weight lease_ms capacity waiter_lease_ms max_waiters idle_ttl_ms label
--       (arrival: the sequence it once had, to be queued by it again, 0: it comes last; waiter_lease_ms 0: never queue;
--       max_waiters -1: no bound)
-- Reply: {tag, GRANTED, fence, granted_at, deadline, capacity, was_declared}
--        {tag, QUEUED, sequence, ahead, soonest, capacity, was_declared, more}
--        {tag, BUSY, more} {tag, FULL, waiting, more} {tag, MISFIT, capacity} {tag, OTHER_WEIGHT, weight} {tag, WITHDRAWN} {tag, LAPSED}
-- Cost: O(log n) with n holders and waiters, and for each of at most 100 that it reaps or grants.
local tag, ticket, request, place = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease, idle, label = tonumber(ARGV[7]), tonumber(ARGV[11]), ARGV[12]

-- What is usual: a new ticket of weight 1 on a name that nobody used for long, or with nothing declared anew, and neither a
-- tombstone nor a watcher nor the expiry of the keys asking for more.
local was = call('HMGET', state, 'f', 'e', 'c', 'd', 's', 'k', 'x', 'w', 't' .. ticket)
local fence = clock[1] * 1000000 + clock[2]
if ARGV[6] == '1' and not was[6] and call('ZCARD', holders) + call('ZCARD', queue) == 0 then
  local deadline, its_fence = now + lease, format('%d', fence)
  local ends = format('%d', now + math.max(lease, idle) + math.floor(idle / 64))
  call('ZADD', holders, format('%d', deadline), ticket)
  call('PEXPIREAT', holders, ends)
  call('HSET', state, 'f', its_fence, 'c', ARGV[8], 'd', ARGV[8], 'k', ends, 't' .. ticket,
    '1 ' .. its_fence .. ' ' .. ARGV[7] .. ' ' .. format('%d', now) .. ' ' .. place .. ' ' .. request .. ' ' .. label)
  call('PEXPIREAT', state, ends)
  return {tag, GRANTED, fence, now, deadline, tonumber(ARGV[8])}
end
if ARGV[6] == '1' and not was[9] and was[4] == ARGV[8] and was[6] and tonumber(was[6]) >= now + math.max(lease, idle)
  and fence > tonumber(was[1] or 0) and now >= tonumber(was[7] or 0) and now >= tonumber(was[8] or 0) then
  local capacity, used, waiting = tonumber(was[3]), call('ZCARD', holders) + (was[2] or 0), call('ZCARD', queue)
  local since = format('%d', now)
  if waiting == 0 and used < capacity then -- there is room, and it is granted
    local deadline, its_fence = now + lease, format('%d', fence)
    call('ZADD', holders, format('%d', deadline), ticket)
    call('PEXPIREAT', holders, was[6])
    call('HSET', state, 'f', its_fence, 't' .. ticket,
      '1 ' .. its_fence .. ' ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
    return {tag, GRANTED, fence, now, deadline, capacity}
  end
  local first = used >= capacity and call('ZRANGE', holders, 0, 0, 'WITHSCORES')[2]
  local wait = first and tonumber(first) - now or 0
  local waiter_lease, most = tonumber(ARGV[9]), tonumber(ARGV[10])
  local lapses = wait > 0 and waiter_lease > 0 and call('ZSCORE', waiters, place)
  if lapses and tonumber(lapses) > now and waiting > 0 and ARGV[5] == '0' and (most < 0 or waiting < most)
    and tonumber(was[6]) >= now + waiter_lease then
    -- It is full, and it stands behind others from the same place; the keys last as long as that does.
    local its_sequence = format('%d', (was[5] or 0) + 1)
    call('ZADD', queue, its_sequence, ticket)
    call('ZADD', waiters, 'GT', format('%d', now + waiter_lease), place)
    call('HSET', state, 's', its_sequence, 't' .. ticket,
      '1 0 ' .. ARGV[7] .. ' ' .. since .. ' ' .. place .. ' ' .. request .. ' ' .. label)
    return {tag, QUEUED, tonumber(its_sequence), waiting, wait, capacity, 0, 0}
  end
end

--#include state
local weight, wanted = tonumber(ARGV[6]), tonumber(ARGV[8])
read(ticket)
if tombstones > now and call('ZSCORE', waiters, '!' .. request) then return {tag, WITHDRAWN} end

-- A declaration counts only when it differs from the last declared one, so that it does not undo a resize.
local was_declared, was_capacity = 0, capacity
if declared ~= wanted then
  if declared ~= 0 or capacity == 0 then capacity = wanted end
  was_declared, declared = declared, wanted
end

local function grant()
  make_holder(ticket, weight, lease, place, request, label, now + lease)
  settle(now + lease, idle)
  return {tag, GRANTED, fence, now, now + lease, capacity, was_declared}
end

-- The common path: room, nobody queued, nothing to reap. Its first write is one that a full server refuses.
local ahead = call('ZCARD', queue)
if ahead == 0 and not record and used + weight <= capacity then return grant() end

--#include queue
local waiter_lease, most, arrival = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[5])
local deadline = now + waiter_lease

-- The last reads before the first write: from here on no key can turn out to be of a wrong type.
local lapses, wait = call('ZSCORE', waiters, place), soonest()

local function write(its_fence, since)
  set('t' .. ticket, format('%d %s %d %s %s %s %s', weight, its_fence, lease, since, place, request, label))
end

-- A ticket that is a holder already: its permit, with a full lease.
-- Only the request that has it may make its lease end earlier; another's copy of the ticket may be held elsewhere.
local function held(its_fence, since, was_until, its_request)
  local deadline = its_request == request and now + lease or math.max(was_until, now + lease)
  call('PEXPIREAT', state, format('%d', math.max(expires, deadline))) -- allowed on a full server, and so is the rest
  lease_until(ticket, deadline)
  write(its_fence, since)
  if was_until > deadline then tell_head() end
  settle(deadline, idle)
  return {tag, GRANTED, tonumber(its_fence), tonumber(since), deadline, capacity, was_declared}
end

local queued_since = false
if record then
  local its_weight, its_fence, _, since, its_place, its_request = parse(record)
  local kept, was_until
  if its_fence ~= '0' then
    was_until = tonumber(call('ZSCORE', holders, ticket) or 0)
    kept = was_until > now
  else
    kept = alive(its_place) and call('ZSCORE', queue, ticket)
  end
  if kept then
    if its_weight ~= weight then return {tag, OTHER_WEIGHT, its_weight} end
    -- A late copy, sent before its client moved to a new place, must not tie the ticket to the old one again. The places
    -- of two clients tell nothing of each other: a request that is handed from one to the next goes on with the latter.
    if its_request == request and its_place ~= place
      and string.match(its_place, '^[^|]*') == string.match(place, '^[^|]*')
      and tonumber(string.match(its_place, '%d+$') or 0) > tonumber(string.match(place, '%d+$') or 0) then
      return {tag, WITHDRAWN}
    end
    if its_fence ~= '0' then -- it declares nothing, and finds its permit whatever the capacity is now
      capacity, declared, was_declared = was_capacity, tonumber(was[4] or 0), 0
      return held(its_fence, since, was_until, its_request)
    end
    queued_since = since
  end
end

if weight > capacity then return {tag, MISFIT, capacity} end
if waiter_lease > 0 and lapses and tonumber(lapses) <= now then return {tag, LAPSED} end

if queued_since then
  call('PEXPIREAT', state, format('%d', math.max(expires, deadline))) -- allowed on a full server, and so is the rest
  if waiter_lease > 0 then
    call('ZADD', waiters, 'GT', format('%d', deadline), place)
    call('HSET', state, 't' .. ticket,
      format('%d 0 %d %s %s %s %s', weight, lease, queued_since, place, request, label))
  end
end

-- The queue moves only where time or this call has made it due; then who asks now comes after those who wait.
local more = 0
if wait == 0 or used < capacity or was_capacity ~= capacity or (record and not queued_since) then
  if not queued_since then call('HSET', state, 'c', capacity) end -- a full server refuses it, and with it the rest
  if record and not queued_since then
    local its_weight, its_fence = parse(record)
    if its_fence ~= '0' then remove_holder(ticket, its_weight) else remove_waiter(ticket) end
  end
  more = advance()
  if call('ZCARD', queue) == 0 and used + weight > capacity then reap(BATCH) end
  if was_capacity > capacity then tell_capacity() end
  settle(deadline, idle)
  changes, size, was, new_holder = {'HSET', state}, 2, {fence, excess, capacity, declared}, false
  ahead, wait = call('ZCARD', queue), soonest()
end

if arrival > 0 and not queued_since then -- it counts from where it stood: of those who wait some came after it
  ahead = call('ZCOUNT', queue, '-inf', format('(%d', arrival))
end

if queued_since then
  ahead = call('ZRANK', queue, ticket)
  if not ahead then -- granted just now
    local _, its_fence, _, since, _, its_request = parse(call('HGET', state, 't' .. ticket))
    return held(its_fence, since, tonumber(call('ZSCORE', holders, ticket)), its_request)
  end
elseif ahead == 0 and used + weight <= capacity then
  return grant()
elseif waiter_lease > 0 and arrival == 0 and most >= 0 and ahead >= most then
  -- Only live waiters count; dead ones that are not at the head are still in the queue.
  for _, other in ipairs(call('ZRANGE', queue, 0, math.min(most, 10 * BATCH))) do
    local _, _, _, _, its_place = parse(call('HGET', state, 't' .. other) or '')
    if not its_place or not alive(its_place) then
      remove_waiter(other)
      more = 1
    end
  end
  ahead = call('ZCARD', queue)
  if ahead >= most then return {tag, FULL, ahead, more} end
end
if waiter_lease == 0 then return {tag, BUSY, more} end

local its_sequence = arrival > 0 and arrival or sequence + 1
if queued_since then
  its_sequence = tonumber(call('ZSCORE', queue, ticket))
else
  call('ZADD', queue, format('%d', its_sequence), ticket)
  set('s', format('%d', math.max(sequence, its_sequence)))
  local new_place = call('ZADD', waiters, 'GT', format('%d', deadline), place) == 1
  if new_place then call('ZREMRANGEBYSCORE', waiters, '-inf', format('%d', now - FORGET_MS)) end
  new_waiter = new_place or ahead == 0
end
write('0', queued_since or format('%d', now))
settle(deadline, idle)
return {tag, QUEUED, its_sequence, ahead, wait, capacity, was_declared, more}
