-- repair: checks that what the keys of a resource contain fits together, and writes it again where a key, a field or a member was
-- lost. Operations that write include it behind `read`.
--
-- Each entry among the holders and in the queue has a record, and the header counts all other fields. So a loss changes a sum, which
-- every call compares. Losses that outweigh each other are found by a check of everything, which a small resource gets once in the
-- time that `read` was told, and by what comes upon one of them: it sets field v to 0.
--
-- A permit stays if its entry and its record are there. An entry without a record becomes \255?<ticket>, which keeps one unit until the
-- lease would end. What stands for a limit of no units gets its record again, other limits without one are removed. If the queue is
-- long or does not fit together, all places lapse, so that the clients queue again.
was.stored, was.waiting = call('HLEN', state), call('ZCARD', queue) -- no locals: each makes every call allocate more
was.is_damaged = was.stored ~= was.count + used - excess + was.waiting + turns.count + turns.keys
  or (used > 0 and not was[2]) or (used == excess and excess ~= 0) or was[18] == '0'
if was.is_damaged or (was.is_due and was.stored > 0 and was.stored <= 200) then
(function() -- a function of its own, so that its locals enlarge no other call's stack
local OF_KEYS, HEADS, REST = 4503599627370496, 2251799813685248, 4503599627370496 -- see queue.lua and turns.lua
local CHUNK, LONG = 100, 1000
local is_damaged = was.is_damaged
local wanted, count, keys, numbers, moved -- the fields to be stored, and how many; keys by name and by number; entries to be renamed
local found -- what the header must say

local function want(field, text)
  if not wanted[field] then count = count + 1 end
  wanted[field] = text
end

-- Notes that a ticket has a key, as field p says; returns what is found of that key, and the ticket's sequence.
local function with_key(ticket, text)
  local its_sequence, name = string.match(text, '^%S+ (%-?%d+) (.*)$')
  want('p' .. ticket, text)
  found.tickets = found.tickets + 1
  keys[name] = keys[name] or {held = 0, number = 0, head = ''}
  return keys[name], tonumber(its_sequence)
end

-- Returns what stands for a holder without a record: its name, false if nothing does, and its record.
local function stand_in(name, ends)
  local kind = string.match(name, '^\255(%a+)')
  if kind == 'pause' or kind == 'back' or kind == 'rate' then
    return name, format('%d 0 0 %d - - ["",{}]', ends < OF_KEYS and capacity or 0, now)
  end
  local its_name = not kind and (string.byte(name) == 255 and name or '\255?' .. name)
  if its_name ~= name then moved[#moved + 1] = {name, its_name, ends + (was[16] or 0)} end
  return its_name, format('1 0 0 %d - - ', now)
end

-- Returns the field p that a holder must have, as its name or the label that its client wrote tells; nil if it has no key, false if it
-- is not to be known.
local function key_told(name, ends, label)
  if ends >= OF_KEYS then return '1 0 ' .. (string.match(name, '^\255%a+ (.*)$') or '') end
  if string.sub(label, -2) ~= '"]' then return end
  -- From its end: a search from its start would try each place at which metadata look like it.
  local key = string.match(string.reverse(label), '^%]"([^"\\]*)"%s*,}')
  return key and '1 0 ' .. string.reverse(key) or false
end

local function holder(name, ends, text, of_key)
  local weight, its_fence, _, _, _, _, label = parse(text or '')
  local is_permit = string.byte(name) ~= 255
  if not of_key then
    of_key = key_told(name, ends, label or '')
    is_damaged = is_damaged or of_key ~= nil
  end
  if not weight or of_key == false or (is_permit and its_fence == '0') then
    is_damaged = true
    name, text = stand_in(name, ends)
    if not name or wanted['t' .. name] then return true end
    weight = parse(text)
  elseif is_permit then
    found.fence = math.max(found.fence, tonumber(its_fence))
  end
  want('t' .. name, text)
  found.excess = found.excess + weight - 1
  found.ends = math.max(found.ends, ends % OF_KEYS + (was[16] or 0))
  if ends >= OF_KEYS then found.limits = found.limits + 1 end
  if of_key then
    local key = with_key(name, of_key)
    key.held = key.held + weight
  end
  return true
end

-- Returns whether a waiter fits in.
local function waiter(entry, score, text, of_key)
  local _, its_fence = parse(text or '')
  local is_of_key = string.byte(entry) == 255
  local ticket = is_of_key and string.sub(entry, 19) or entry
  if its_fence ~= '0' or wanted['t' .. ticket] then return false end
  if is_of_key ~= (of_key and true or false) or is_of_key ~= (score >= HEADS) then return false end
  want('t' .. ticket, text)
  if not is_of_key then
    found.sequence = math.max(found.sequence, score)
    return true
  end
  local key, its_sequence = with_key(ticket, of_key)
  found.sequence = math.max(found.sequence, its_sequence)
  if tonumber(string.sub(entry, 2, 17)) ~= its_sequence + 1000 then return false end
  if score < REST then
    found.lowest = math.min(found.lowest, score)
    if key.head ~= '' then return false end
    key.head = entry
    return true
  end
  local number = score - REST
  numbers[number] = numbers[number] or key
  if numbers[number] ~= key or (key.number > 0 and key.number ~= number) then return false end
  key.number, key.waits, found.number = number, true, math.max(found.number, number)
  return true
end

-- Calls `each` with every entry, its score and the fields t and p of its ticket, while it returns true; returns whether it did.
local function for_all(entries, each)
  for first = 1, #entries, CHUNK do
    local names = {}
    for i = first, math.min(#entries, first + CHUNK - 1), 2 do
      local ticket = each == waiter and string.byte(entries[i]) == 255 and string.sub(entries[i], 19) or entries[i]
      names[#names + 1], names[#names + 2] = 't' .. ticket, 'p' .. ticket
    end
    for i, text in ipairs(call('HMGET', state, unpack(names))) do names[i] = text end
    for i = 1, #names, 2 do
      if not each(entries[first + i - 1], tonumber(entries[first + i]), names[i], names[i + 1]) then return false end
    end
  end
  return true
end

-- Gathers what is there; returns whether the waiters fit in, if it is told to look at them.
local function gather(with_waiters)
  wanted, count, keys, numbers, moved = {}, 0, {}, {}, {}
  found = {fence = fence, sequence = sequence, number = turns.numbers or 0, ends = now + idle, lowest = REST}
  found.excess, found.tickets, found.limits, found.keys = 0, 0, 0, 0
  for_all(call('ZRANGE', holders, 0, -1, 'WITHSCORES'), holder)
  return with_waiters and for_all(call('ZRANGE', queue, 0, -1, 'WITHSCORES'), waiter)
end

local tombstone = call('ZRANGE', waiters, 0, 0, 'WITHSCORES')[2]
local fits = gather(was.waiting <= LONG)
if not fits then gather(false) end
for name, key in pairs(keys) do
  local was_key, look = unpack(call('HMGET', state, 'q' .. name, 'l' .. name))
  local number = tonumber(string.match(was_key or '', '^%d+ (%d+) ') or 0)
  if not key.waits and number > 0 and not numbers[number] then
    key.number, numbers[number], found.number = number, key, math.max(found.number, number)
  end
  local text = (key.held > 0 or key.head ~= '' or key.waits) and format('%d %d ', key.held, key.number) .. key.head or false
  if text then
    want('q' .. name, text)
    found.keys = found.keys + 1
    if look then -- see room.lua
      want('l' .. name, look)
      found.keys = found.keys + 1
    end
  end
  is_damaged = is_damaged or text ~= was_key
end
found.tombstone = math.max(tombstones, math.ceil(-(tombstone or 0)))
if fits and not is_damaged and count + was.count == was.stored and (was[3] or not was[4])
  and found.fence == fence and found.excess == excess and found.sequence == sequence and found.tombstone == tombstones
  and found.tickets == turns.count and found.keys == turns.keys and found.limits == (turns.limits or 0)
  and found.number == (turns.numbers or 0) then
  redis.pcall('HSET', state, 'v', format('%d', now)) -- it may fail for lack of memory: then the next call checks again
  return
end

call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
for _, move in ipairs(moved) do
  call('ZREM', holders, move[1])
  if move[2] then call('ZADD', holders, format('%d', move[3]), move[2]) end
end
if not fits then
  call('PEXPIREAT', queue, 1) -- in the past: it is deleted
  for _, place in ipairs(call('ZRANGEBYSCORE', waiters, '(' .. format('%d', now), '+inf')) do
    call('ZADD', waiters, format('%d', now), place)
  end
end
for i, field in ipairs({'', '', '', 'd', '', '', '', 'w', '', 'n', '', 'b', 'r', '', '', 'y', 'h'}) do
  if field ~= '' and was[i] then wanted[field] = was[i] end
end
local last_place = call('ZRANGE', waiters, -1, -1, 'WITHSCORES')[2]
expires = math.max(expires, found.ends, last_place or 0, found.tombstone, watched)
wanted.f, wanted.e, wanted.s = format('%d', found.fence), format('%d', found.excess), format('%d', found.sequence)
wanted.c = capacity > 0 and format('%d', capacity) or nil
wanted.k, wanted.v, wanted.x = format('%d', expires), format('%d', now), format('%d', found.tombstone)
if found.tickets > 0 then
  local virtual = turns.virtual or found.lowest < REST and math.max(0, found.lowest - HEADS - 1) or 0
  local start, raised = turns.start or virtual, fits and 1 or 0
  wanted.g = format('%d %.0f %.0f %.0f %d %d %d', found.tickets, virtual, start, found.number, raised, found.limits, found.keys)
end
call('PEXPIREAT', state, 1)
local texts = {}
for field, text in pairs(wanted) do
  texts[#texts + 1], texts[#texts + 2] = field, text
  if #texts >= CHUNK then
    call('HSET', state, unpack(texts))
    texts = {}
  end
end
if #texts > 0 then call('HSET', state, unpack(texts)) end
expire_all()
turns.count, turns.keys, turns.raised = 0, 0, 0
read(was.ticket)
was.waiting = call('ZCARD', queue)
end)()
end
