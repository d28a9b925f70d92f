-- repair: checks that what the keys of a resource contain fits together, and writes it again where a key, a field or a member was
-- lost. Operations that write include it behind `read`.
--
-- Each entry among the holders and in the queue has a record, and the header counts all other fields. So a loss changes a sum, which
-- every call compares. Losses that outweigh each other are found by a check of everything, which a small resource gets once in the
-- time that `read` was told, and by what comes upon one of them: it sets field v to 0.
--
-- A call that an error stops half-way leaves no field e, see `writes` in state.lua. So does a repair, which writes e with its last command.
--
-- A permit stays if its entry and its record are there. An entry without a record becomes \255?<ticket>, which keeps one unit until the
-- lease would end; one that still has the record of a waiter is removed, since the call that wrote it was stopped before it published the grant.
-- A limit of no units gets its record again, other limits without one are removed. A waiter stays if it fits to those before it.
-- If none does, or more wait than a call may look at, all places lapse, so that the clients queue again.
was.stored, was.waiting = call('HLEN', state), call('ZCARD', queue) -- no locals: each makes every call allocate more
was.is_damaged = was.stored ~= was.count + used - excess + was.waiting + turns.count + turns.keys
  or (was.stored > 0 and not was.excess) or (used == excess and excess ~= 0) or was.checked == '0'
if was.is_damaged or (was.is_due and was.stored > 0 and was.stored <= 200) then
(function() -- a function of its own, so that its locals enlarge no other call's stack
local OF_KEYS, HEADS, REST = 4503599627370496, 2251799813685248, 4503599627370496 -- see queue.lua and turns.lua
local unpack = unpack or table.unpack
local CHUNK = 100 -- fields and values of one command
local LONG = 100000 -- waiters: some 1 s in which the server does nothing else
local LARGE = 131072 -- bytes of records: some 1 ms, the most for a check where nothing tells of a loss
local is_damaged = was.is_damaged
local wanted, count, changed = {}, 0, {} -- the fields to be stored, how many, and those that are to be written
local keys, numbers = {}, {} -- keys by name and by number
local moved, removed = {}, {} -- entries of holders to be renamed, and of the queue to be removed
local bytes, waiters_that_fit = 0, 0
local found = {fence = fence, sequence = sequence, number = turns.numbers or 0, ends = now + idle, lowest = REST} -- what the header must say
found.excess, found.tickets, found.limits, found.keys = 0, 0, 0, 0

local function want(field, text, was_text)
  if not wanted[field] then count = count + 1 end
  wanted[field] = true
  if text == was_text then return end
  changed[#changed + 1], changed[#changed + 2], is_damaged = field, text, true
end

-- Notes that a ticket has a key, as field p says; returns what is found of that key, and the ticket's sequence.
local function with_key(ticket, text, was_text)
  local its_sequence, name = string.match(text, '^%S+ (%-?%d+) (.*)$')
  want('p' .. ticket, text, was_text)
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
  if its_name ~= name then moved[#moved + 1] = {name, its_name, ends + (was.lock_delay or 0)} end
  return its_name, format('1 0 0 %d - - ', now)
end

-- Returns the field p that a holder must have, as its name or the label that its client wrote tells; nil if it has no key, false if it
-- is not to be known.
local function key_told(name, ends, text)
  if ends >= OF_KEYS then return '1 0 ' .. (string.match(name, '^\255%a+ (.*)$') or '') end
  if string.sub(text, -2) ~= '"]' then return end
  -- From its end: a search from its start would try each place at which metadata look like it.
  local key = string.match(string.reverse(string.sub(text, -2048)), '^%]"([^"\\]*)"%s*,}')
  return key and '1 0 ' .. string.reverse(key) or false
end

local function holder(name, ends, text, of_key)
  local weight, its_fence, units = string.match(text or '', '^(%d+) (%d+) (%d+) %d+ %S+ %S+ ')
  local is_permit, was_text, was_key = string.byte(name) ~= 255, text, of_key
  if not of_key then of_key = key_told(name, ends, text or '') end
  if is_permit and its_fence == '0' then -- granted by a call that was stopped
    moved[#moved + 1], is_damaged = {name}, true
    return
  elseif not weight or of_key == false then
    is_damaged = true
    name, text = stand_in(name, ends)
    if not name or wanted['t' .. name] then return end
    weight, was_text, was_key = string.match(text, '^%d+'), false, false
  elseif is_permit then
    found.fence = math.max(found.fence, tonumber(its_fence))
  elseif capacity > 0 and string.find(name, '^\255%a+$') and ends < OF_KEYS then -- of the resource: it keeps all other units
    weight = math.max(0, capacity - units)
    text = string.gsub(text, '^%d+', format('%d', weight))
  end
  want('t' .. name, text, was_text)
  found.excess = found.excess + weight - 1
  found.ends = math.max(found.ends, ends % OF_KEYS + (was.lock_delay or 0))
  if ends >= OF_KEYS then found.limits = found.limits + 1 end
  if of_key then
    local key = with_key(name, of_key, was_key)
    key.held = key.held + weight
  end
end

-- Returns whether a waiter fits in.
local function fits(entry, ticket, score, text, of_key)
  local is_of_key = string.byte(entry) == 255
  if not string.find(text or '', '^%d+ 0 ') or wanted['t' .. ticket] then return false end
  if is_of_key ~= (of_key and true or false) or is_of_key ~= (score >= HEADS) then return false end
  if not is_of_key then
    found.sequence = math.max(found.sequence, score)
    return true
  end
  local its_sequence, name = string.match(of_key, '^%S+ (%-?%d+) (.*)$')
  local key, number = keys[name] or {number = 0, head = ''}, score - REST
  its_sequence = tonumber(its_sequence)
  if tonumber(string.sub(entry, 2, 17)) ~= its_sequence + 1000 then return false end
  if score < REST then
    if key.head ~= '' then return false end
  elseif (numbers[number] or key) ~= key or (key.number > 0 and key.number ~= number) then
    return false
  end
  key = with_key(ticket, of_key, of_key)
  found.sequence = math.max(found.sequence, its_sequence)
  if score < REST then
    found.lowest, key.head = math.min(found.lowest, score), entry
  else
    key.number, key.waits, numbers[number], found.number = number, true, key, math.max(found.number, number)
  end
  return true
end

local function waiter(entry, score, text, of_key)
  local ticket = string.byte(entry) == 255 and string.sub(entry, 19) or entry
  if fits(entry, ticket, score, text, of_key) then
    want('t' .. ticket, text, text)
    waiters_that_fit = waiters_that_fit + 1
    return
  end
  removed[#removed + 1], is_damaged = entry, true
  local place, request = string.match(text or '', '^%d+ 0 %d+ %d+ (%S+) (%S+) ')
  for its_place, its_request in string.gmatch(place and '{' .. place .. '}' .. request or '', '{([^}]*)}([^{]*)') do
    publish(its_place, 'x ' .. its_request)
  end
end

-- Calls `each` with every entry, its score and the fields t and p of its ticket. Returns whether it came to the end: it stops where the records
-- are large, unless they are damaged.
local function for_all(entries, each)
  local step = is_damaged and CHUNK or 40
  for first = 1, #entries, step do
    if bytes > LARGE and not is_damaged then return false end
    local names = {}
    for i = first, math.min(#entries, first + step - 1), 2 do
      local ticket = each == waiter and string.byte(entries[i]) == 255 and string.sub(entries[i], 19) or entries[i]
      names[#names + 1], names[#names + 2] = 't' .. ticket, 'p' .. ticket
    end
    for i, text in ipairs(call('HMGET', state, unpack(names))) do
      names[i] = text
      bytes = bytes + (text and #text or 0)
    end
    for i = 1, #names, 2 do each(entries[first + i - 1], tonumber(entries[first + i]), names[i], names[i + 1]) end
  end
  return true
end

local is_complete = for_all(call('ZRANGE', holders, 0, -1, 'WITHSCORES'), holder)
if is_complete and was.waiting <= LONG then
  is_complete = for_all(call('ZRANGE', queue, 0, -1, 'WITHSCORES'), waiter)
end
local tombstone = call('ZRANGE', waiters, 0, 0, 'WITHSCORES')[2]
found.tombstone = math.max(tombstones, math.ceil(-(tombstone or 0)))
for name, key in pairs(keys) do
  local was_key, look = unpack(call('HMGET', state, 'q' .. name, 'l' .. name))
  local number = tonumber(string.match(was_key or '', '^%d+ (%d+) ') or 0)
  if not key.waits and number > 0 and not numbers[number] then
    key.number, numbers[number], found.number = number, key, math.max(found.number, number)
  end
  if key.held > 0 or key.head ~= '' or key.waits then
    want('q' .. name, format('%d %d ', key.held, key.number) .. key.head, was_key)
    found.keys = found.keys + 1
    if look then -- see room.lua
      want('l' .. name, look, look)
      found.keys = found.keys + 1
    end
  end
end
local is_as_told = count + was.count == was.stored and (was.capacity or not was.declared)
  and found.fence == fence and found.excess == excess and found.sequence == sequence and found.tombstone == tombstones
  and found.tickets == turns.count and found.keys == turns.keys and found.limits == (turns.limits or 0)
  and found.number == (turns.numbers or 0)
if not is_damaged and (is_as_told or not is_complete) then
  redis.pcall('HSET', state, 'v', format('%d', now)) -- it may fail for lack of memory: then the next call checks again
  return
end

writes.begin()
local function in_chunks(command, key, words)
  for first = 1, #words, CHUNK do call(command, key, unpack(words, first, math.min(#words, first + CHUNK - 1))) end
end
in_chunks('HSET', state, changed)
for _, move in ipairs(moved) do
  if move[2] then call('ZADD', holders, format('%d', move[3]), move[2]) end
  call('ZREM', holders, move[1])
end
if was.waiting > 0 and waiters_that_fit == 0 then
  call('PEXPIREAT', queue, 1) -- in the past: it is deleted
  for _, place in ipairs(call('ZRANGEBYSCORE', waiters, '(' .. format('%d', now), '+inf')) do
    call('ZADD', waiters, format('%d', now), place)
  end
else
  in_chunks('ZREM', queue, removed)
end
local last_place = tonumber(call('ZRANGE', waiters, -1, -1, 'WITHSCORES')[2] or 0)
expires = math.max(expires, found.ends, last_place, found.tombstone, watched)
local header = {
  f = format('%d', found.fence), s = format('%d', found.sequence), x = format('%d', found.tombstone),
  k = format('%d', expires), v = format('%d', now), c = capacity > 0 and format('%d', capacity) or nil,
}
if found.tickets > 0 then
  local virtual = turns.virtual or found.lowest < REST and math.max(0, found.lowest - HEADS - 1) or 0
  local start, raised = turns.start or virtual, waiters_that_fit > 0 and 1 or 0 -- all keys are looked at, whatever the limits were
  header.g = format('%d %.0f %.0f %.0f %d %.0f %d %d', found.tickets, virtual, start, found.number, raised, raised * found.number, found.limits, found.keys)
end
local words = {}
for field, text in pairs(header) do
  wanted[field], words[#words + 1], words[#words + 2] = true, field, text
end
call('HSET', state, unpack(words))
for field, text in pairs({d = was.declared, w = was.watched, n = was.history, b = was.per_key, r = was.rate, y = was.lock_delay, h = was.mean_hold}) do
  wanted[field] = text and true -- as it was
end
local others = {}
for _, field in ipairs(call('HKEYS', state)) do
  if not wanted[field] then others[#others + 1] = field end
end
in_chunks('HDEL', state, others)
call('HSET', state, 'e', format('%d', found.excess))
writes.expire_all()
turns.count, turns.keys, turns.raised = 0, 0, 0
read(was.ticket)
was.waiting = call('ZCARD', queue)
end)()
end
