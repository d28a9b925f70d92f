-- acquire: requests a permit; a repeated request gets its existing permit, with a full lease again, or keeps its place.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket request place arrival weight lease_ms capacity waiter_lease_ms max_waiters idle_ttl_ms label key
--       (arrival: > 0: the sequence it had before, to queue again at that position; 0: at the tail; < 0: at the tail too, minus the
--       `next` of the reply FULL; a leading "+": it was queued before, so it does not
--       declare its capacity and settings again; weight: or "weight priority lock_delay_ms history per_key share rate key_rate": for each step of the
--       priority it queues ten places ahead of the tail; the delay, how many entries of history to keep, and how many units one
--       key may have (0: any number) become those of the resource unless empty, as do the rate, "interval_us:burst" or 0 for none, and
--       after it the rate of each key; key: left out if it has none, see parts/turns.lua;
--       waiter_lease_ms 0: never queue; max_waiters: how many may wait, -1 for any number, and after it how many of the key)
-- Reply: {tag, GRANTED, fence, granted_at, deadline, capacity, was_declared[, more]}
--        {tag, QUEUED, sequence, ahead, soonest, capacity, was_declared, more, now}
--        {tag, BUSY, more} {tag, FULL, waiting, next[, of_key[, wait_ms]]} {tag, MISFIT, capacity[, of_key]} {tag, OTHER_WEIGHT, weight[, of_key]} {tag, WITHDRAWN[, superseded]} {tag, LAPSED}
-- Cost: O(log n) with n holders and waiters, and O(log n) for each of at most 16 that it reaps or grants.
local tag, ticket, request, place = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease, idle, label = tonumber(ARGV[7]), tonumber(ARGV[11]), ARGV[12]
local is_plain = ARGV[6] == '1' and not ARGV[13]

--#include acquire_usual
--#include state
--#include grants
local weight, wanted, priority, share_of_key, key = tonumber(ARGV[6]), tonumber(ARGV[8]), 0, 1, ARGV[13]
read(ticket, lease)
--#include form
--#include repair
turns.key = key
local buried = tombstones > now and call('ZSCORE', waiters, '!' .. request)
if buried and math.abs(tonumber(buried)) > now then
  return tonumber(buried) % 1 == 0 and {tag, WITHDRAWN} or {tag, WITHDRAWN, 1}
end

-- A declaration counts only if it differs from the last one, so that it does not undo a resize. A copy of a request declares nothing.
local was_declared, was_capacity, declares = 0, capacity, declared == 0 or string.byte(ARGV[5]) ~= 43
if record and declared ~= 0 then
  local _, _, _, _, _, requests = parse(record)
  if string.find('}' .. requests .. '{', '}' .. request .. '{', 1, true) then declares = false end
end
if declared ~= wanted and declares then
  -- The first one keeps what an operator has set before, but for a lock or a read-write lock, which no resize may change.
  if declared ~= 0 or capacity == 0 or wanted == 1 or wanted == 2147483647 then capacity = wanted end
  was_declared, declared = declared, wanted
end
if not weight then
  local its_weight, its_priority, delay, entries, per_key, its_share, its_rate, key_rate =
    string.match(ARGV[6], '^(%d+) (%d+) ?(%d*) ?(%d*) ?(%d*) ?([%d.]*) ?([%d:]*) ?([%d:]*)$')
  weight, priority, share_of_key = tonumber(its_weight), tonumber(its_priority), tonumber(its_share) or 1
  if not declares then delay, entries, per_key, its_rate, key_rate = '', '', '', '', '' end
  local interval, burst = string.match(key_rate, '^(%d+):?(%d*)$')
  interval, burst = tonumber(interval), tonumber(burst)
  per_key = tonumber(per_key) or turns.limit
  local is_paced = interval and (interval ~= (turns.interval or 0) or burst ~= turns.burst)
  local is_faster = is_paced and turns.interval and (not burst or interval < turns.interval or burst > turns.burst)
  if per_key ~= turns.limit or is_paced then
    local is_higher = turns.limit > 0 and (per_key == 0 or per_key > turns.limit)
    if (is_higher or is_faster) and turns.count > 0 and call('ZCARD', queue) > 0 then turns.is_raised = true end
    turns.limit = per_key
    if interval then turns.interval, turns.burst = burst and interval, burst end
    set('b', per_key .. (turns.interval and format(' %d %d', turns.interval, turns.burst) or ''))
  end
  if delay ~= '' then set('y', delay) end
  interval, burst = string.match(its_rate, '^(%d+):?(%d*)$')
  interval, burst = tonumber(interval), tonumber(burst)
  if burst and not (rate and rate.interval == interval and rate.burst == burst) then
    -- The next token comes when it would have, but one new interval from now at the latest; and the burst gathers anew, so that
    -- processes that declare two rates in turn get no more than the higher one.
    local tat = 0
    if rate then
      local us = clock[1] * 1000000 + clock[2]
      tat = math.min(math.max(us, rate.tat - (rate.burst - 1) * rate.interval), us + interval) + (burst - 1) * interval
    end
    rate = {interval = interval, burst = burst, tat = tat, is_changed = true}
    set('r', format('%d %d %.0f', interval, burst, tat))
  elseif interval and rate and not burst then
    rate.is_changed, rate.is_over = true, true
  end
  if entries == '0' then
    if was.history then call('HDEL', state, 'n') end
    was.history = false
  elseif entries ~= '' and entries ~= was.history then
    set('n', entries)
    was.history = entries
  end
end

local more = 0

local function grant()
  make_holder(ticket, weight, lease, place, request, label, now + lease, now)
  if key then
    writes.begin()
    turns.add(ticket, key, share_of_key, 0)
    turns.grant(key, weight)
  end
  commit(now + lease, idle)
  return {tag, GRANTED, fence, now, now + lease, capacity, was_declared, more > 0 and more or nil}
end

-- Free capacity, an empty queue, nothing to reap, except for a history, which tells of losses without delay. The first write is
-- one that a server out of memory refuses.
local ahead = was.waiting
if ahead == 0 and not record and not key and not (rate and rate.is_changed) and used + weight <= capacity and (capacity == was_capacity or expires == 0)
  and (not was.history or call('ZCOUNT', holders, '-inf', now) == 0) then
  return grant()
end

--#include queue
--#include share
local waiter_lease, most, arrival = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[5])
local deadline = now + waiter_lease
local most_of_key
if not most then most, most_of_key = string.match(ARGV[10], '^(%S+) (%d+)$') end
most, most_of_key = tonumber(most), tonumber(most_of_key)
local claim = request -- followed by the requests that share its ticket

-- The last reads before the first write: after them a key of a wrong type can no longer stop the script.
local lapses, wait = call('ZSCORE', waiters, place), soonest()

local function adapt_rate()
  local name = string.char(255) .. 'rate'
  local its_weight = parse(call('HGET', state, 't' .. name) or '')
  writes.begin()
  if its_weight then remove_holder(name, its_weight) end
  if rate.is_over then
    rate = nil
    call('HDEL', state, 'r')
  else
    rate.is_changed = false
    await_token()
  end
  call('HDEL', state, 'o') -- who is told first is told anew
  if not rate then publish_to_head() end
end

local function write(its_fence, since)
  set('t' .. ticket, share.record(weight, its_fence, lease, since, place, claim, label))
end

-- The ticket holds a permit already: renew it to its full lease.
-- The lease may end earlier than before only if no other request shares the ticket.
local function held(its_fence, since, was_until)
  local deadline = claim == request and now + lease or math.max(was_until, now + lease)
  call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
  lease_until(ticket, deadline)
  write(its_fence, since)
  local is_paced = rate and rate.is_changed
  if is_paced then adapt_rate() end
  if was_until > deadline then publish_to_head() end
  if is_paced or turns.raised ~= 0 then more = grant_waiting() end
  commit(deadline, idle)
  return {tag, GRANTED, tonumber(its_fence), tonumber(since), deadline, capacity, was_declared, more > 0 and more or nil}
end

local queued_since = false
if record then
  local its_weight, its_fence, _, since, its_place, its_request, its_label = parse(record)
  local kept, was_until
  if its_fence ~= '0' then
    was_until = tonumber(call('ZSCORE', holders, ticket) or 0)
    kept = was_until > now
  else
    local _, entry = entry_of(ticket)
    kept = lasts(its_place, its_request) and call('ZSCORE', queue, entry)
  end
  if kept then
    if string.find(its_fence, '^0.') then return {tag, WITHDRAWN, 1} end
    if its_weight ~= weight then return {tag, OTHER_WEIGHT, its_weight} end
    if entry_of(ticket) ~= key then
      local is_its_own = key and its_label == label and string.find(label, ',"' .. key .. '"]', 1, true)
      if not is_its_own then return {tag, OTHER_WEIGHT, its_weight, 1} end
      set('v', '0') -- what else told of its key was lost, see parts/repair.lua
    end
    -- A late copy, sent before its client moved to a new place, must not bind the ticket to the old place again. Epochs
    -- of different clients are not comparable: a request passed on to another client continues with that client's place.
    if share.is_late(its_place, its_request, request, place) then return {tag, WITHDRAWN} end
    _, claim = share.changed(its_place, its_request, request, place, its_fence == '0')
    if its_fence ~= '0' then -- it declares no capacity, and gets its permit whatever the capacity is now
      capacity, declared, was_declared = was_capacity, tonumber(was.declared or 0), 0
      return held(its_fence, since, was_until)
    end
    queued_since = since
  end
end

if weight > capacity then return {tag, MISFIT, capacity} end
if key and turns.is_heavy(key, weight) then return {tag, MISFIT, turns.limit, 1} end
if waiter_lease > 0 and lapses and tonumber(lapses) <= now then return {tag, LAPSED} end

if queued_since and waiter_lease > 0 then
  call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
  call('ZADD', waiters, 'GT', format('%d', deadline), place)
  call('HSET', state, 't' .. ticket, share.record(weight, '0', lease, queued_since, place, claim, label))
end

-- Grant waiters only if an expiry or this call makes it possible; they come before this request. A new declaration is stored
-- even if it changes no capacity and the request is refused: it would undo a later resize otherwise.
if is_due(wait) or used < capacity or declared ~= tonumber(was.declared or 0) or size > 2 or (rate and rate.is_changed)
  or (record and not queued_since) then
  if not queued_since then call('HSET', state, 'c', was.capacity or capacity) end -- refused when out of memory, which ends the script here
  if capacity ~= was_capacity then
    writes.begin()
--#include limits
  end
  if rate and rate.is_changed then adapt_rate() end
  if record and not queued_since then
    local its_weight, its_fence = parse(record)
    if its_fence ~= '0' then
      lapse(ticket, its_weight, tonumber(call('ZSCORE', holders, ticket) or 0), its_fence)
    else
      remove_waiter(ticket)
    end
  end
  if key and turns.limited and not queued_since then -- expired permits and dead waiters of its key, though capacity is free
    reap()
    if used < capacity then turns.use(key, 0) end
  end
  more = grant_waiting()
  if (was.waiting <= 0 or call('ZCARD', queue) == 0) and (was.history or used + weight > capacity) then
    reap()
    if left <= 0 then more = 1 end
  end
  if was_capacity > capacity then publish_capacity() end
  commit(deadline, idle)
  changes, size, new_holder = {'HSET', state}, 2, false
  was.fence, was.excess, was.capacity, was.declared, was.checked, was.has_begun = fence, excess, capacity, declared, true, false -- as `commit` wrote them
  ahead, wait = call('ZCARD', queue), soonest()
  was.waiting = ahead
end

-- A priority moves a request forward by a bounded number of arrivals: so many later ones, and no more, may pass an earlier one.
local its_sequence = arrival > 0 and arrival or sequence + 1 - 10 * priority
local before, turn = ahead, nil -- how many are granted first; the tag, if there are keys
if not queued_since and turns.before_all then
  turn, before = turns.before_all(key, weight, its_sequence, ticket, share_of_key)
elseif not queued_since and (arrival > 0 or priority ~= 0) then
  before = call('ZCOUNT', queue, '-inf', format('(%d', its_sequence))
end

if queued_since then
  local its_key, entry = entry_of(ticket)
  before = call('ZRANK', queue, entry)
  if before and turns.rank then before = turns.rank(its_key, entry) end
  if not before then -- granted just now
    local text = call('HGET', state, 't' .. ticket)
    if not text and turns.limit > 0 and weight > turns.limit then return {tag, MISFIT, turns.limit, 1} end -- of its key, from now on
    if not text then return {tag, LAPSED} end -- and deleted: see `commit`
    local _, its_fence, _, since = parse(text)
    return held(its_fence, since, tonumber(call('ZSCORE', holders, ticket) or 0))
  end
elseif before == 0 and used + weight <= capacity and (turn or not key) then
  if ahead > 0 then set('s', format('%d', sequence + 1)) end -- it passes those who wait, and counts as an arrival
  if turn then turns.virtual = math.max(turns.virtual, turn) end
  return grant()
elseif waiter_lease > 0 and arrival <= 0 and (most_of_key or (most >= 0 and ahead >= most)) then
  local refusal = (function() -- a function of its own, so that its locals enlarge no other call's stack
--#include behind
--#include room
  end)()
  if refusal then return refusal end
end
if waiter_lease == 0 then return {tag, BUSY, more} end

if queued_since then
  local its_key, entry, _, arrived = entry_of(ticket)
  its_sequence = its_key and arrived or tonumber(call('ZSCORE', queue, entry))
elseif key then
  call('HSET', state, 't' .. ticket, share.record(weight, '0', lease, now, place, claim, label))
  turns.add(ticket, key, share_of_key, its_sequence)
else
  if turns.without_key then turns.without_key() end
  call('ZADD', queue, format('%d', its_sequence), ticket)
end
if not queued_since then
  set('s', format('%d', arrival > 0 and math.max(sequence, arrival) or sequence + 1))
  local new_place = call('ZADD', waiters, 'GT', format('%d', deadline), place) == 1
  if new_place then share.forget() end
  if key then turns.enter(key, ticket, its_sequence) end -- behind its place, by which it lives
  new_waiter = new_place or ahead == 0
end
write('0', queued_since or format('%d', now))
replied_to = ticket
commit(deadline, idle)
return {tag, QUEUED, its_sequence, before, told(wait, ticket), capacity, was_declared, more, now}
