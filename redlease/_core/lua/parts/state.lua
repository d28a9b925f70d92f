-- state: reads and writes the header and the records. scripts.py puts it where operations say `--#include state`.

local fence, sequence, capacity, declared, used, excess, record
local expires, tombstones, watched
local turns = {count = 0, keys = 0, raised = 0, limit = 0} -- see turns.lua, which not all operations include
local rate -- of grants, if there is one: interval and tat in us, and burst; see grants.lua
local tell_first, replied_to -- see queue.lua; and the waiter to whom the reply tells what the message would
local was -- the header as it was read, and what read and repair.lua note beside it
local new_holder, new_waiter = false, false -- whether a key may have been created that has no expiry yet

-- Reads the header and one ticket's record. It is the first access to state and holders: a key of a wrong type fails here.
-- `check_ms`: how long the resource may go without a check as a whole.
local function read(ticket, check_ms)
  was = read_header(
    'fence', 'excess', 'capacity', 'declared', 'sequence', 'expires', 'tombstones', 'watched', 'record', 'history', 'turns',
    'per_key', 'rate', 'seen_alive', 'notified', 'lock_delay', 'mean_hold', 'checked'
  )
  was.ticket, was.count = ticket, was.record and -1 or 0 -- how many fields the header has
  for i = 1, HEADER_SIZE do
    if was[i] then was.count = was.count + 1 end
  end
  was.is_due = check_ms and (now >= (was.checked or 0) + math.max(check_ms, 1000) or now < was.checked + 0) -- the clock may have been set back
  fence, excess = was.fence and tonumber(was.fence) or 0, was.excess and tonumber(was.excess) or 0
  used = call('ZCARD', holders) + excess
  declared = was.declared and tonumber(was.declared) or 0
  capacity = was.capacity and tonumber(was.capacity) or declared
  sequence, expires = was.sequence and tonumber(was.sequence) or 0, was.expires and tonumber(was.expires) or 0
  if expires < 0 then return end -- stored in another form, see form.lua
  tombstones, watched = was.tombstones and tonumber(was.tombstones) or 0, was.watched and tonumber(was.watched) or 0
  record = was.record
  if was.per_key then
    local limit, interval, burst = string.match(was.per_key, '^(%d+) ?(%d*) ?(%d*)$')
    turns.limit, turns.interval, turns.burst = tonumber(limit), tonumber(interval), tonumber(burst)
  end
  if was.rate then
    local interval, burst, tat = string.match(was.rate, '^(%d+) (%d+) (%d+)$')
    rate = {interval = tonumber(interval), burst = tonumber(burst), tat = tonumber(tat)}
  end
  if was.turns then
    local count, virtual, start, numbers, raised, raised_to, limits, keys =
      string.match(was.turns, '^(%d+) (%d+) (%-?%d+) (%d+) (%-?%d+) (%d+) (%d+) (%d+)$')
    if keys then
      turns.count, turns.virtual, turns.start, turns.numbers = count + 0, virtual + 0, start + 0, numbers + 0
      turns.raised, turns.raised_to, turns.limits, turns.keys = raised + 0, raised_to + 0, limits + 0, keys + 0
    else
      was.turns, was.checked = false, '0' -- it was overwritten: repair.lua writes it again
    end
  end
end

local function parse(text)
  local weight, its_fence, lease, since, place, request, label =
    string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%S+) (%S+) (.*)$')
  return tonumber(weight), its_fence, lease, since, place, request, label
end

local writes = {} -- functions, in one table: each local makes every call allocate more; and the grants to be published, with their places

-- Marks that this call has begun to write what belongs together, until `save`. An error may stop it at any command: while its slot moves
-- to another node, a script can touch no key that has become empty. Without field e the fast paths grant nothing, and the next call
-- counts all units, see repair.lua. A deletion is allowed when out of memory, and so are later writes.
function writes.begin()
  if was.has_begun then return end
  was.has_begun, was.excess = true, false
  call('HDEL', state, 'e')
end

-- Keeps a message until its grant is stored: a call that is stopped half-way publishes none.
function writes.add_grant(place, message)
  writes[#writes + 1] = place
  writes[#writes + 1] = message
end

-- A channel that begins with a colon is appended to the state key, so that it is in the slot of the keys: a sharded channel,
-- or an ordinary one if the server (Redis 6.2) has no sharded ones.
local function publish(place, message)
  local channel = string.match(place, '^[^|]*')
  if string.byte(channel) == 58 then
    channel = state .. channel
    if type(redis.pcall('SPUBLISH', channel, message)) ~= 'table' then return end
  end
  redis.pcall('PUBLISH', channel, message)
end

-- Collects the fields of the state to be written at the end of the call, with one command. Numbers are formatted here: that is
-- several times cheaper than in redis.call, where Lua's own conversion would also round a fence to 14 digits.
local changes, size = {'HSET', state}, 2
local function set(field, text)
  changes[size + 1], changes[size + 2], size = field, text, size + 2
end

-- Adds an entry to the history, where one is kept. No call fails if it cannot be written, for lack of memory or of the right.
local function note(event, ticket, its_fence, weight, ms, label)
  if not was.history then return end
  local owner = string.match(label, '^%[("[^"\\]*")') or string.sub(label, 2, 1600) -- with metadata only if it has escapes
  local key = string.sub(label, -2) == '"]' and string.match(label, '^.*},(".*")%]$')
  local history, of_key = string.sub(state, 1, -6) .. 'history', key and {'k', key} or {}
  redis.pcall('XADD', history, 'MAXLEN', '~', was.history, '*', 'e', event, 't', ticket, 'f', its_fence, 'w', weight, 'm', ms, 'o', owner, (unpack or table.unpack)(of_key)) -- Lua 5.2 and later have only the second one
end

-- A key that has become empty cannot be touched while its slot moves; but the state has just been written.
function writes.expire_all()
  call('PEXPIREAT', state, format('%d', expires))
  for i = 2, 4 do redis.pcall('PEXPIREAT', KEYS[i], format('%d', expires)) end
end

-- Writes the changes of the state with one command, and then publishes the grants. Losses have been published before.
function writes.save()
  if fence ~= (tonumber(was.fence) or 0) then set('f', format('%d', fence)) end
  if not was.excess or excess ~= tonumber(was.excess) then set('e', format('%d', excess)) end
  if not was.checked then set('v', format('%d', now)) end
  if capacity ~= (tonumber(was.capacity) or 0) then
    set('c', format('%d', capacity))
    if was.capacity then note('resized', '', '0', capacity, 0, '') end
  end
  if declared ~= (tonumber(was.declared) or 0) then set('d', format('%d', declared)) end
  if turns.store then turns.store() end
  if size > 2 then call((unpack or table.unpack)(changes, 1, size)) end
  while writes[1] do publish(table.remove(writes, 1), table.remove(writes, 1)) end
end

-- Saves the changes. The keys are kept until `deadline`, and for idle_ttl after now and after the time in the last fence. An
-- extension adds a margin, so that most calls need none. The expiry never moves back.
-- A server before Redis 7.2 that stops inside a script for longer than that deletes the keys here, when everything in them has
-- ended. So no expiry is written before this point: what a call writes after a deletion would have none.
local function commit(deadline, idle)
  local wanted = math.max(deadline, math.max(now, math.floor(fence / 1000)) + idle, rate and math.floor(rate.tat / 1000) + 1 or 0, turns.kept or 0)
  local due = expires < wanted
  if due then
    expires = wanted + math.floor(idle / 64)
    set('k', format('%d', expires))
  end
  writes.save()
  if tell_first then tell_first() end
  if due then
    writes.expire_all()
  else
    if new_holder then redis.pcall('PEXPIREAT', holders, format('%d', expires)) end
    if new_waiter then
      redis.pcall('PEXPIREAT', queue, format('%d', expires))
      call('PEXPIREAT', waiters, format('%d', expires))
    end
  end
  if was.history then
    local history = string.sub(state, 1, -6) .. 'history'
    redis.pcall('PEXPIREAT', history, format('%d', expires))
  end
  if watched > now then redis.pcall('PUBLISH', state .. ':watch', '') end
end

-- Greater than every earlier fence; even after the server lost its data, since time carries it forward.
local function next_fence()
  fence = math.max(fence + 1, clock[1] * 1000000 + clock[2])
  return format('%d', fence)
end

-- Sets the deadline of a holder; returns whether it is a new one.
local function lease_until(ticket, deadline)
  if call('ZADD', holders, format('%d', deadline), ticket) == 0 then return false end
  new_holder = true
  return true
end
