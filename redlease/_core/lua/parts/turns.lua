-- turns: the waiters whose requests have a key. scripts.py puts it behind the queue.
-- Without such tickets none of its functions is made: each costs a call as much as a command.
--
-- Keys take turns by self-clocked fair queueing (Golestani, INFOCOM 1994). The first waiter of each key has a tag: the virtual
-- time at which it became the first, plus its weight divided by its share. The lowest tag is granted next, and is the virtual
-- time from then on. So the last tag of a key is never above the virtual time once it has no waiter, and nothing of it is kept.
-- Waiters without a key are of one more key of share 1; the start of their first one stands in the header.
--
-- The scores of the queue are in three ranges, so that it has one entry for each waiter, and the commands take O(log n):
--   below HEADS              waiters without a key, as ever
--   HEADS + tag              the first waiter of each key that is below its limit
--   REST + number of the key the others of that key. Equal scores are ordered by member: \255<sequence> <ticket>
-- The state has p<ticket> "share sequence key" for each ticket with a key, and q<key> "held number head": its units in use, its
-- number, and the member that has a tag; empty if no one waits, or the key is at its limit. Field g counts them, see `store`.

if turns.count > 0 or turns.key then (function() -- a function of its own, so that its locals enlarge no other call's stack
local HEADS, REST = 2251799813685248, 4503599627370496 -- 2^51 and 2^52, so that tags and numbers are whole
local ONE = 1000 -- a unit at share 1: tags are whole numbers
local MILLION = 1048576 -- 2^20
local ALL = 2147483647 -- the weight of a writer: its turn costs no more than that of a reader
if not was.turns then turns.virtual, turns.start, turns.numbers, turns.limits, turns.raised_to = 0, 0, 0, 0, 0 end
turns.limited = turns.limit > 0 or turns.limits > 0 or turns.interval

-- Of a great capacity a unit costs less, so that no cost is beyond 2^40, and the millionth part of all as much as a unit of a million.
local function cost(weight, share)
  if weight >= ALL then weight = 1 end
  local part = capacity < ALL and math.max(1, capacity / MILLION) or 1
  return math.max(1, math.min(2 ^ 43, math.floor(weight * ONE / (share or 1) / part + 0.5)))
end

-- Returns the score of a tag, which is far below its end: see `restart`.
local function score_of(tag)
  return format('%.0f', HEADS + math.max(0, math.min(tag, HEADS - 1)))
end

local function weight_of(ticket)
  return parse(call('HGET', state, 't' .. ticket) or '') or 1
end

function turns.member(sequence, ticket)
  return string.char(255) .. format('%016d ', sequence + ONE) .. ticket -- a priority makes a sequence negative, by 1,000 at most
end

-- Returns the ticket of an entry of the queue.
function turns.ticket(member)
  return string.byte(member) == 255 and string.sub(member, 19) or member
end

-- Returns the key of a ticket, its entry in the queue, its share and its sequence; nil and the ticket if it has no key.
function turns.of(ticket)
  local text = turns.count > 0 and call('HGET', state, 'p' .. ticket)
  if not text then return nil, ticket end
  local share, sequence, key = string.match(text, '^(%S+) (%-?%d+) (.*)$')
  return key, turns.member(tonumber(sequence), ticket), tonumber(share), tonumber(sequence)
end

local function read_key(key)
  local held, number, head = string.match(call('HGET', state, 'q' .. key) or '0 0 ', '^(%d+) (%d+) (.*)$')
  return tonumber(held), tonumber(number), head
end

local function first_of_rest(number)
  local score = format('%.0f', REST + number)
  return number > 0 and call('ZRANGEBYSCORE', queue, score, score, 'LIMIT', 0, 1)[1]
end

-- Returns how many units a key may have: 0 while it is held back, else its own limit, that for each key, or the declared one. And
-- when that ends, unless it is the declared one. `lasting`: the time for which it is held back does not count.
local units_of = {} -- by name: a limit for each key is looked at for each, and its reason may be long
local function limit_of(key, lasting)
  if turns.limits > 0 then
    for _, name in ipairs({not lasting and '\255back ' .. key or '\255limit ' .. key, '\255limit ' .. key, '\255each'}) do
      local ends = (call('ZSCORE', holders, name) or 0) - OF_KEYS
      if ends > now then
        units_of[name] = units_of[name] or tonumber(string.match(call('HGET', state, 't' .. name) or '', '^%d+ %d+ (%d+)'))
        if units_of[name] then return units_of[name], ends end
      end
    end
  end
  return turns.limit > 0 and turns.limit
end

-- Returns whether a weight is more than its key may ever have; a limit of an operator may allow it more for now.
function turns.is_heavy(key, weight)
  return turns.limit > 0 and weight > turns.limit and limit_of(key, true) < weight
end

-- Returns when the next token of a key is due, if it has none now. None comes later than one interval after the last: the rate may
-- be another now.
local function token_due_to(key)
  if not turns.interval or turns.limits == 0 then return end
  local _, _, _, since = parse(call('HGET', state, 't\255rate ' .. key) or '')
  if not since then return end
  local due = math.min((call('ZSCORE', holders, '\255rate ' .. key) or 0) - OF_KEYS, since + 1 + math.ceil(turns.interval / 1000))
  return due > now and due
end

-- Returns whether an operator's limit of the resource allows fewer units, though some: then nobody waits behind that request.
local function is_barred(weight)
  if weight == 1 then return false end
  local ends = call('ZSCORE', holders, '\255limit')
  if not ends or tonumber(ends) <= now then return false end
  local units = tonumber(string.match(call('HGET', state, 't\255limit') or '', '^%d+ 0 (%d+)') or 0)
  return units > 0 and weight > units
end

local function over_limit(key, held, weight)
  local most = limit_of(key)
  return most and held + weight > most or token_due_to(key) or is_barred(weight)
end

-- Returns how many units of a key must be released before it may have so many more; a time without grants ends by itself.
function turns.lacks(key, weight)
  local most = limit_of(key, true)
  return most and turns.held(key) + weight - most or 0
end

-- Returns how many units a key has in use.
function turns.held(key)
  return (read_key(key))
end

-- Returns how many waiters a key has.
function turns.waiting(key)
  local _, number, head = read_key(key)
  local score = format('%.0f', REST + number)
  return (head ~= '' and 1 or 0) + (number > 0 and call('ZCOUNT', queue, score, score) or 0)
end

-- Returns the ranks from which and before which the waiters of a key stand, without its first one, and that one if it has a tag.
function turns.ranks(key)
  local _, number, head = read_key(key)
  local score = format('%.0f', REST + number)
  local from = call('ZCOUNT', queue, '-inf', '(' .. score)
  return from, number > 0 and from + call('ZCOUNT', queue, score, score) or from, head ~= '' and head
end

-- Returns the waiters of a key that came before one of them, about a batch of them at most.
function turns.before(key, member)
  local from, to, head = turns.ranks(key)
  local found = {head and head < member and head or nil}
  for _, other in ipairs(call('ZRANGE', queue, from, math.min(from + BATCH, to) - 1)) do
    if other < member then found[#found + 1] = other end
  end
  return found
end

-- Forgets a ticket that neither holds nor waits any more.
function turns.remove(ticket)
  turns.count = turns.count - call('HDEL', state, 'p' .. ticket)
end

-- Returns the first of a key's other waiters that lives and may ever fit, with its weight, and removes those before it.
local function next_of_rest(key, number)
  while left > 0 do
    local member = first_of_rest(number)
    if not member then return end
    local ticket = turns.ticket(member)
    local text = call('HGET', state, 't' .. ticket) or ''
    local weight, _, _, _, place, request = parse(text)
    local lives = weight and lasts(place, request)
    if lives and not turns.is_heavy(key, weight) then return member, weight end
    left = left - 1 - #text / 2048
    writes.begin()
    if lives then publish_to_sharers(place, request, 'm', ' ' .. turns.limit) end
    call('ZREM', queue, member)
    call('HDEL', state, 't' .. ticket)
    turns.remove(ticket)
  end
  local member = first_of_rest(number) -- if it is dead too, the next grant removes it
  return member, member and weight_of(turns.ticket(member))
end

-- Stores a key; one without a first waiter gets one, from that virtual time on, if it is below its limit.
local function write_key(key, held, number, head, from)
  local member, weight
  if held < 0 then -- its record was lost, see repair.lua
    held = 0
    set('v', '0')
  end
  if head == '' then member, weight = next_of_rest(key, number) end
  if member and not over_limit(key, held, weight) then
    local _, _, share = turns.of(turns.ticket(member))
    call('ZADD', queue, score_of(from + cost(weight, share)), member)
    head = member
  end
  if held > 0 or head ~= '' or member then
    turns.keys = turns.keys + call('HSET', state, 'q' .. key, format('%d %d ', held, number) .. head)
  else
    turns.keys = turns.keys - call('HDEL', state, 'q' .. key, 'l' .. key)
  end
end

-- Adds a ticket with a key, before it holds or waits.
function turns.add(ticket, key, share, sequence)
  turns.count = turns.count + call('HSET', state, 'p' .. ticket, format('%s %d ', share, sequence) .. key)
end

-- Adds units to those that a key has in use, or takes them away.
function turns.use(key, units)
  if key == '' then return end -- of the limit for each key, which has no units
  local held, number, head = read_key(key)
  write_key(key, held + units, number, head, turns.virtual)
end

-- Keeps a number for a key until then, by an entry among the holders without weight.
local function keep(kind, key, number, until_ms)
  local name = string.char(255) .. kind .. ' ' .. key
  if lease_until(name, OF_KEYS + until_ms) then
    excess = excess - 1
    turns.add(name, key, 1, 0)
    turns.limits = turns.limits + 1
  end
  call('HSET', state, 't' .. name, format('0 %.0f 0 %d - - ["",{}]', number, now))
  turns.kept = math.max(turns.kept or 0, until_ms)
end

-- Takes a token of a key whose request is granted; one without any has to wait for the next, see grants.lua.
local function spend(key)
  if not turns.interval then return end
  local us, interval = clock[1] * 1000000 + clock[2], turns.interval
  local _, tat = parse(call('HGET', state, 't\255tat ' .. key) or '')
  tat = math.max(tonumber(tat or 0), us) + interval
  if turns.burst > 1 then keep('tat', key, tat, math.ceil(tat / 1000)) end
  local due_us = tat - (turns.burst - 1) * interval
  if due_us > us then keep('rate', key, 0, math.ceil(due_us / 1000)) end
end

-- Grants a key that many units: of what it waits for, its next waiter learns.
function turns.grant(key, units, was_first)
  spend(key)
  local held, number, head = read_key(key)
  write_key(key, held + units, number, was_first and '' or head, turns.virtual)
  if turns.interval then turns.tell_next(key) end
end

-- Returns the ms until an expiry can let a waiter proceed whose key has no turn, -1 if none can; nil if it has one. Of those that
-- wait for a token of the key only the first calls when it is due.
function turns.told(key, entry)
  local _, number, head = read_key(key)
  if head ~= '' then return end
  local due = token_due_to(key)
  if due then return first_of_rest(number) == entry and due - now or -1 end
  local units, ends = limit_of(key)
  local wait, held = -1, call('ZRANGE', holders, 0, 1, 'WITHSCORES')
  for i = #held - 1, 1, -2 do -- a lease may be one of its key; the wait for a token of the resource says nothing of a unit
    if held[i] ~= '\255rate' and tonumber(held[i + 1]) < OF_KEYS then wait = math.max(0, held[i + 1] - now) end
  end
  return ends and (units == 0 or wait < 0 or ends - now < wait) and ends - now or wait
end

-- Returns the ms until a token of its key is due for a waiter.
function turns.waits(key, entry)
  local due = token_due_to(key)
  if not due then return -1 end
  local _, number = read_key(key)
  local before = call('ZRANK', queue, entry) - call('ZCOUNT', queue, '-inf', '(' .. format('%.0f', REST + number))
  return due - now + math.floor(math.max(0, before) * turns.interval / 1000)
end

-- Notifies the next waiter of a key when an expiry can let it proceed, if the key has no turn; with `ms`, after that time anyway.
function turns.tell_next(key, ms)
  local _, number, head = read_key(key)
  local entry = head ~= '' and head or first_of_rest(number)
  local wait = ms or (entry and turns.told(key, entry)) or -1
  if entry and wait >= 0 then publish_expiry(turns.ticket(entry), wait) end
end

-- Notes that keys which wait at their limit may have more units now. A pass over them that is under way is followed by another: if
-- it began again, raises in turn would never let it come to the last keys. It ends at the last number of now, since
-- a key with a later one is at the limit as it is now.
function turns.begin_pass()
  if turns.raised > 1 then turns.raised = -turns.raised end
  if turns.raised >= 0 then turns.raised, turns.raised_to = 1, turns.numbers end
end
if turns.is_raised then turns.begin_pass() end -- by a declaration, see acquire.lua

-- Gives a key a first waiter if it may have one now; with the key '' all keys that have none.
function turns.look_again(key)
  if key ~= '' then return turns.use(key, 0) end
  turns.begin_pass()
  turns.raise()
end

-- Notes that a limit for a key is over; '' for each key.
function turns.lifted(key)
  turns.limits = turns.limits - 1
  turns.look_again(key)
end

-- Returns the virtual time at which the first waiter of a key became the first, or a new one would.
local function started(head)
  if head == '' then return turns.virtual end
  local ticket = turns.ticket(head)
  local _, _, share = turns.of(ticket)
  local score = call('ZSCORE', queue, head)
  if not score then set('v', '0') end
  return score and score - HEADS - cost(weight_of(ticket), share) or turns.virtual
end

-- Returns the tag of a new request if it goes before all who wait, else nil; and how many are before it, about.
function turns.before_all(key, weight, sequence, ticket, share)
  local _, entry, lowest, its_key = turns.first()
  if not key then
    local others = call('ZCOUNT', queue, '-inf', format('(%d', sequence))
    local tag = (call('ZCOUNT', queue, '-inf', '(' .. score_of(0)) > 0 and turns.start or turns.virtual) + cost(weight, 1)
    if others == 0 and (not lowest or tag < lowest or not its_key) then return tag, 0 end
    return nil, others + call('ZCOUNT', queue, score_of(0), score_of(tag))
  end
  local held, number, head = read_key(key)
  local member, score = turns.member(sequence, ticket), format('%.0f', REST + number)
  local tag, rest = started(head) + cost(weight, share), first_of_rest(number)
  local is_first = not over_limit(key, held, weight) and (head == '' or member < head) and (not rest or member < rest)
  if is_first and (not lowest or tag < lowest or entry == head) then return tag, 0 end
  return nil, call('ZCOUNT', queue, score_of(0), score_of(tag)) + call('ZCOUNT', queue, score, score)
end

-- Queues a ticket with a key, whose record is written.
function turns.enter(key, ticket, sequence)
  local held, number, head = read_key(key)
  local member, from = turns.member(sequence, ticket), turns.virtual
  if number == 0 then
    turns.numbers = turns.numbers + 1
    number = turns.numbers
  end
  if head ~= '' and member < head then -- a priority, or its former place, puts it before the first
    from = started(head)
    call('ZADD', queue, format('%.0f', REST + number), head)
    head = ''
  end
  call('ZADD', queue, format('%.0f', REST + number), member)
  write_key(key, held, number, head, from)
end

-- Notes that a waiter without a key comes.
function turns.without_key()
  if call('ZCOUNT', queue, '-inf', '(' .. score_of(0)) == 0 then turns.start = turns.virtual end
end

-- Removes a waiter; the next one of its key gets the turn that it had. `entry`: its own, if that was found.
function turns.leave(ticket, entry)
  local key, member, share = turns.of(ticket)
  local score = key and call('ZSCORE', queue, member)
  local removed = call('ZREM', queue, entry or member)
  if removed == 0 or (not key and string.byte(entry or '') == 255) then set('v', '0') end
  if not key then return end
  local held, number, head = read_key(key)
  local from, rest = turns.virtual, first_of_rest(number)
  local was_next = head == '' and (not rest or member < rest)
  if head == member then head, from = '', score and score - HEADS - cost(weight_of(ticket), share) or from end
  write_key(key, held, number, head, from)
  turns.remove(ticket)
  if was_next then turns.tell_next(key) end
end

-- Returns the waiter that is granted next, its entry, its tag and its key; nothing if no one waits, or all are at their limits.
function turns.first()
  local low = call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  local ticket, tag
  if low[1] and tonumber(low[2]) < HEADS then
    local weight = weight_of(low[1])
    ticket, tag = low[1], is_barred(weight) and HEADS or turns.start + cost(weight, 1)
  end
  local head = call('ZRANGEBYSCORE', queue, score_of(0), '(' .. format('%.0f', REST), 'WITHSCORES', 'LIMIT', 0, 1)
  if head[1] and (not tag or head[2] - HEADS < tag) then
    return turns.ticket(head[1]), head[1], head[2] - HEADS, (turns.of(turns.ticket(head[1])))
  end
  return ticket, ticket, tag
end

-- Lets the first waiter of a key, nil for those without one, go before all others: it takes over units of its key.
function turns.lead(key)
  local _, _, lowest, its_key = turns.first()
  if not lowest or its_key == key then return end
  if not key then
    local low = call('ZRANGEBYSCORE', queue, '-inf', '(' .. score_of(0), 'LIMIT', 0, 1)[1]
    if low then turns.start = lowest - 1 - cost(weight_of(low), 1) end
    return
  end
  local _, _, head = read_key(key)
  if head ~= '' then call('ZADD', queue, score_of(lowest - 1), head) end
end

-- Takes the first waiter out of the queue, since it is granted; its record has been written.
function turns.take(member, tag, key, weight)
  call('ZREM', queue, member)
  turns.virtual = math.max(turns.virtual, tag)
  if not key then
    turns.start = turns.virtual
    return
  end
  turns.grant(key, weight, true)
end

-- Puts the first waiter of a key back if the limit of its key has become too low for it; returns whether it did.
function turns.park(member, key, weight)
  local held, number = read_key(key)
  if not over_limit(key, held, weight) then return false end
  call('ZADD', queue, format('%.0f', REST + number), member)
  turns.keys = turns.keys + call('HSET', state, 'q' .. key, format('%d %d ', held, number))
  turns.tell_next(key)
  return true
end

-- Gives keys that waited at their limit a first waiter, after the limit was raised. The next call goes on from the number
-- `turns.raised`, which is negative if the limit was raised again meanwhile, to `turns.raised_to`. Half of what a call may
-- still do is left for grants, so that no unit is idle meanwhile.
function turns.raise()
  local rest = left / 2
  while left > rest and turns.raised ~= 0 do
    left = left - 1
    local from, to = format('%.0f', REST + math.abs(turns.raised)), format('%.0f', REST + turns.raised_to)
    local entry = call('ZRANGEBYSCORE', queue, from, to, 'WITHSCORES', 'LIMIT', 0, 1)
    local key = entry[1] and turns.of(turns.ticket(entry[1]))
    if not entry[1] then
      local is_raised_again = turns.raised < 0
      turns.raised, turns.raised_to = 0, 0
      if is_raised_again then turns.begin_pass() end
    else
      local following = entry[2] - REST + 1
      turns.raised = turns.raised < 0 and -following or following
      if not key then set('v', '0') end
      local held, number, head = read_key(key or '')
      if key and head == '' then
        write_key(key, held, number, head, turns.virtual)
        turns.tell_next(key) -- it may have to wait for less time now
      else
        left = left + 0.75 -- it has a turn, which a few commands tell
      end
    end
  end
end

-- Returns about how many are granted before a waiter: those of its own key, and as many turns of each other key.
function turns.rank(key, entry)
  local rank, keys = call('ZRANK', queue, entry), call('ZCOUNT', queue, score_of(0), '(' .. format('%.0f', REST))
  local without_key = call('ZCOUNT', queue, '-inf', '(' .. score_of(0))
  if not key then return math.min(rank * (1 + keys), call('ZCARD', queue) - 1) end
  local _, number, head = read_key(key)
  if head == entry then return rank - without_key + math.min(without_key, 1) end
  local before, others = rank - call('ZCOUNT', queue, '-inf', '(' .. format('%.0f', REST + number)), keys + math.min(without_key, 1)
  before = head == '' and before + (before + 1) * others or (before + 1) * others
  return math.min(before, call('ZCARD', queue) - 1)
end

-- Returns how many of a key are before one of its waiters, of that weight, and about how many others, as their shares are; and what
-- these weigh. The first waiters of some keys tell of all.
function turns.ahead(key, entry, weight)
  local _, number, head = read_key(key)
  local _, _, share = turns.of(turns.ticket(entry))
  local own = head == entry and 0 or call('ZRANK', queue, entry) - call('ZCOUNT', queue, '-inf', '(' .. format('%.0f', REST + number))
  local turn = cost(weight, share or 1)
  local virtual = (own + 1) * turn -- until its tag
  if head ~= '' then
    virtual = math.max(0, (call('ZSCORE', queue, head) or HEADS) - HEADS - turns.virtual) + own * turn
    if head ~= entry then own = own + 1 end
  end
  local keys, shares, weights, looked = call('ZCOUNT', queue, score_of(0), '(' .. format('%.0f', REST)), 0, 0, 0
  for _, other in ipairs(call('ZRANGEBYSCORE', queue, score_of(0), '(' .. format('%.0f', REST), 'LIMIT', 0, 20)) do
    if other ~= head then
      local ticket = turns.ticket(other)
      local _, _, its_share = turns.of(ticket)
      shares, weights, looked = shares + (its_share or 1), weights + weight_of(ticket), looked + 1
    end
  end
  if head ~= '' then keys = keys - 1 end
  local without_key = call('ZCOUNT', queue, '-inf', '(' .. score_of(0))
  local their_weight = looked > 0 and weights / looked or 1
  local their_shares = (looked > 0 and keys * shares / looked or 0) + math.min(1, without_key)
  local others = call('ZCARD', queue) - turns.waiting(key)
  return own, math.min(others, virtual / cost(their_weight, 1) * their_shares), their_weight
end

-- Returns how many units a key may have, if there is a bound, and for how long it is held back.
function turns.allowed(key)
  local ends = (call('ZSCORE', holders, '\255back ' .. key) or 0) - OF_KEYS
  return limit_of(key, true), math.max(0, ends - now)
end

-- Lets the virtual time begin again before tags reach their end: one pass over the keys, once in 2^50 of it.
local function restart()
  local at, chunk = call('ZCOUNT', queue, '-inf', '(' .. score_of(0)), {}
  repeat
    chunk = call('ZRANGE', queue, at, at + BATCH - 1, 'WITHSCORES') -- what has been moved keeps its rank
    local moved = {}
    for i = 1, #chunk, 2 do
      local score = tonumber(chunk[i + 1])
      if score < REST then moved[#moved + 1], moved[#moved + 2] = score_of(score - HEADS - turns.virtual), chunk[i] end
    end
    if #moved > 0 then call('ZADD', queue, (unpack or table.unpack)(moved)) end
    at = at + BATCH
  until #moved < 2 * BATCH
  turns.start, turns.virtual = turns.start - turns.virtual, 0
end

-- Writes how many tickets have a key and how far their turns are, if that has changed.
function turns.store()
  if turns.virtual > HEADS / 2 then restart() end
  local text = turns.count > 0
    and format('%d %.0f %.0f %.0f %.0f %.0f %d %d', turns.count, turns.virtual, turns.start, turns.numbers, turns.raised, turns.raised_to, turns.limits, turns.keys)
  if text and text ~= was.turns then set('g', text) end
  if was.turns and not text then call('HDEL', state, 'g') end
  was.turns = text
end
end)() end
