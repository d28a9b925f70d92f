-- state: reading and writing the header and the records. wire.py puts it where operations say `--#include state`.

local fence, sequence, capacity, declared, used, excess, record
local expires, tombstones, watched
local was -- the header as it was read
local new_holder, new_waiter = false, false -- whether a key may have been created that has no end yet

-- Reads the header and one ticket's record. It is the first access to both, so a key of a wrong type fails here.
local function read(ticket)
  was = call('HMGET', state, 'f', 'e', 'c', 'd', 's', 'k', 'x', 'w', 't' .. ticket)
  fence, excess = was[1] and tonumber(was[1]) or 0, was[2] and tonumber(was[2]) or 0
  used = call('ZCARD', holders) + excess
  capacity, declared = was[3] and tonumber(was[3]) or 0, was[4] and tonumber(was[4]) or 0
  sequence, expires = was[5] and tonumber(was[5]) or 0, was[6] and tonumber(was[6]) or 0
  tombstones, watched = was[7] and tonumber(was[7]) or 0, was[8] and tonumber(was[8]) or 0
  record = was[9]
end

local function parse(text)
  local weight, its_fence, lease, since, place, request, label =
    string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%S+) (%S+) (.*)$')
  return tonumber(weight), its_fence, lease, since, place, request, label
end

-- A channel that begins with a colon stands beside the keys, as a cluster wants it: a sharded one, or an ordinary one where
-- the server (Redis 6.2) has no others.
local function tell(place, message)
  local channel = string.match(place, '^[^|]*')
  if string.byte(channel) == 58 then
    channel = state .. channel
    if type(redis.pcall('SPUBLISH', channel, message)) ~= 'table' then return end
  end
  redis.pcall('PUBLISH', channel, message)
end

-- What is to be written to the state at the end of the call, in one go. Numbers are made strings here: that is several
-- times cheaper than leaving it to redis.call, and Lua's own conversion would round a fence to 14 digits.
local changes, size = {'HSET', state}, 2
local function set(field, text)
  changes[size + 1], changes[size + 2], size = field, text, size + 2
end

local function expire_all()
  for i = 1, 4 do call('PEXPIREAT', KEYS[i], format('%d', expires)) end
end

-- The common end of a change. The keys are kept for idle_ttl past the later of now and its last fence, and past `deadline`;
-- when that is due, a little longer, so that most calls need not set it. It never moves back.
local function settle(deadline, idle)
  local wanted = math.max(deadline, math.max(now, math.floor(fence / 1000)) + idle)
  local due = expires < wanted
  if due then
    expires = wanted + math.floor(idle / 64)
    set('k', format('%d', expires))
  end
  if fence ~= (tonumber(was[1]) or 0) then set('f', format('%d', fence)) end
  if excess ~= (tonumber(was[2]) or 0) then set('e', format('%d', excess)) end
  if capacity ~= (tonumber(was[3]) or 0) then set('c', format('%d', capacity)) end
  if declared ~= (tonumber(was[4]) or 0) then set('d', format('%d', declared)) end
  if size > 2 then call(unpack(changes, 1, size)) end
  if due then
    expire_all()
  else
    if new_holder then call('PEXPIREAT', holders, format('%d', expires)) end
    if new_waiter then
      call('PEXPIREAT', queue, format('%d', expires))
      call('PEXPIREAT', waiters, format('%d', expires))
    end
  end
  if watched > now then redis.pcall('PUBLISH', state .. ':watch', '') end
end

-- P3: above every earlier fence, and above those of a lost life of the server as time alone carries it forward.
local function next_fence()
  fence = math.max(fence + 1, clock[1] * 1000000 + clock[2])
  return format('%d', fence)
end

-- Sets when a lease ends.
local function lease_until(ticket, deadline)
  if call('ZADD', holders, format('%d', deadline), ticket) == 1 then new_holder = true end
end

-- Adds a holder; its client is told by the caller.
local function make_holder(ticket, weight, lease, place, request, label, deadline)
  lease_until(ticket, deadline)
  used, excess = used + weight, excess + weight - 1
  set('t' .. ticket, format('%d %s %d %d %s %s %s', weight, next_fence(), lease, now, place, request, label))
end
