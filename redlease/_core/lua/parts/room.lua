-- room: refuses a request that finds too many waiters, of its key or in all; acquire includes it in the branch of those that queue.
-- Only live ones count. A place that lapses may leave dead ones anywhere in the queue. They are looked for since then, some by each
-- call, whoever makes it: field l, and l<key> for the waiters of one key, has the time at which the last look began that is complete,
-- and of one that is not: when it began, the us of its last call, and the score and the entry that it has come to. Meanwhile a
-- request is sent again; one that has waited for too long is refused, and the next ones go on with the look.
local STEP = 64 -- what a call looks at: a waiter counts as one, and one more for each 1,024 bytes; and four more if it is removed
local GAP_US, OTHERS_MS = 1000, 10 -- one call looks in that time, whatever their number; the others come again so much later
local SILENCE_MS = 200 -- how long a request is told to wait in all: fewer than 1,000
local us, token = clock[1] * 1000000 + clock[2], arrival < 0 and -arrival or 1000 * now
local asked, waited_ms = math.floor(token / 1000), token % 1000

-- Removes a waiter if it is dead; returns whether it lives, and what that counts. Its rank: nil for the first of a key.
local function lives(entry, rank)
  local ticket = ticket_of(entry)
  local text = call('HGET', state, 't' .. ticket) or ''
  local its_place, its_request = string.match(text, '^%d+ %d+ %d+ %d+ (%S+) (%S+)')
  if its_place and lasts(its_place, its_request) then return true, 1 + #text / 1024 end
  remove_waiter(ticket, entry)
  if not rank or rank < before then before = before - 1 end
  ahead, more = call('ZCARD', queue), 1 -- with it may have gone others of its key
  return false, 5 + #text / 1024
end

-- Looks for dead waiters, and removes them until there is room; `ranks` returns from where to where, and the first of the key, which
-- stands elsewhere. Returns the ms after which the request is to be sent again; nil if there is room, or
-- it is refused.
local function look(field, ranks, is_full)
  local known = call('HGET', state, field)
  local complete, rest = string.match(known or '0', '^(%d+) ?(.*)$')
  local began, went_on, score, entry = string.match(rest, '^(%d+) (%d+) (%S+) (.*)$')
  complete, began, went_on = tonumber(complete), tonumber(began), tonumber(went_on)
  if waited_ms >= SILENCE_MS then return end
  if began and went_on <= us and us < went_on + GAP_US then return OTHERS_MS end
  local left, wait_ms = STEP, nil
  while is_full() do
    if not began then
      -- A place is kept for a while after it has lapsed; then nobody can tell that it did.
      local is_recent = complete <= now and now < complete + FORGET_MS
      if is_recent and (complete >= asked or call('ZCOUNT', waiters, format('(%d', complete), now) == 0) then break end
      began, score, entry = now, '0', ''
    end
    if left <= 0 then
      wait_ms = 1
      break
    end
    local from, to, head = ranks()
    local is_alive, counts = true, 0
    if entry == '' and head then is_alive, counts = lives(head) end
    left = left - counts
    local at = entry == '' and from or math.max(from, behind(queue, entry, score))
    local entries = is_alive and call('ZRANGE', queue, at, math.min(at + STEP, to) - 1, 'WITHSCORES') or {}
    for i = 1, #entries, 2 do
      if left <= 0 then break end
      is_alive, counts = lives(entries[i], at)
      left = left - counts
      if not is_alive then break end
      entry, score, at = entries[i], entries[i + 1], at + 1
    end
    if is_alive and at >= to then
      complete, began = began, nil
    end
  end
  local text = format('%d', complete) .. (began and format(' %d %d %s ', began, wait_ms and us or 0, score) .. entry or '')
  if text ~= (known or '0') then
    local from, to, head = ranks()
    -- It fails for lack of memory: then the next call begins where this one did.
    local written = from == to and not head and -call('HDEL', state, field) or redis.pcall('HSET', state, field, text)
    local added = type(written) == 'number' and written or 0
    if field ~= 'l' then turns.keys = turns.keys + added end
  end
  if turns.store then wait = soonest() end -- another waiter of a key may be the first
  return wait_ms
end

local function refuse(waiting, wait_ms, of_key)
  writes.save()
  tell_first()
  if not wait_ms then return {tag, FULL, waiting, 0, of_key} end
  return {tag, FULL, waiting, token + wait_ms, of_key or 0, wait_ms}
end

if most_of_key and turns.waiting(key) >= most_of_key then
  local function is_full() return turns.waiting(key) >= most_of_key end
  local wait_ms = most_of_key > 0 and look('l' .. key, function() return turns.ranks(key) end, is_full) or nil
  if is_full() then return refuse(turns.waiting(key), wait_ms, 1) end
end
if most >= 0 and ahead >= most then
  local function is_full() return ahead >= most end
  local wait_ms = most > 0 and look('l', function() return 0, ahead end, is_full) or nil
  if is_full() then return refuse(ahead, wait_ms) end
end
