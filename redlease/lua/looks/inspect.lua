-- inspect: returns a snapshot of the resource, or a page of it, without expired entries. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag most_holders most_waiters bytes after_deadline after_ticket after_entry most_counted
--       (bytes: the approximate size limit of the reply; the next three: where the previous page ended, "" for the first;
--       most_counted: past so many live waiters the others are counted without a check)
-- Reply: {tag, now, fence, capacity, in_use, waiting, {ticket, deadline, record, ...}, {ticket, record, ...}, {deadline, ticket,
--        entry}, {name, deadline, record, ...}}; the last list but one is the last three arguments of the next page, {} if there is
--        none; the last one is the limits of the resource, those of keys are among the holders, see parts/limits.lua
--        (in_use: the weights of all holders; those with fence 0 stand for a lock delay or a limit; waiting: how many wait; dead ones
--        past the first 5,000 requests are counted until the queue reaches them, and all are before the last page)
-- Cost: O(b + c + log n) for a reply of b entries, with c waiters checked.
local tag, most_holders, most_waiters, bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local after_deadline, after_ticket = tonumber(ARGV[5]), ARGV[6]
local after_score, after_entry = string.match(ARGV[7], '^(%S+) (.*)$')

--#include state
read('')
--#include form
--#include queue
local PAGE = 50 * BATCH
local function is_limit(name)
  return string.find(name, '^\255%a')
end
local delay, queue_length, count = tonumber(was[16] or 0), call('ZCARD', queue), used - excess
if count <= 200 or call('HLEN', state) ~= was.count + count + queue_length + turns.count + turns.keys then
  -- The units of all holders, if they are not too many: what the header tells of them may be wrong after a loss, see repair.lua.
  local names = call('ZRANGE', holders, 0, PAGE - 1)
  used = used - excess - #names
  for _, name in ipairs(names) do
    used = used + (parse(call('HGET', state, 't' .. name) or '') or is_limit(name) and 0 or 1)
  end
end
local lapsed = call('ZRANGEBYSCORE', holders, '-inf', now, 'WITHSCORES', 'LIMIT', 0, BATCH * 10)
for i = 1, #lapsed, 2 do
  local text = call('HGET', state, 't' .. lapsed[i])
  local is_over = string.byte(lapsed[i]) == 255 or lapsed[i + 1] + delay <= now
  if is_over and not is_limit(lapsed[i]) then used = used - (text and parse(text) or 1) end
end

-- The limits of the resource: what they keep from others, nobody uses.
local limits, names = {}, {'\255limit', '\255pause', '\255back', '\255rate', '\255each'}
for _, name in ipairs(names) do
  local text = call('HGET', state, 't' .. name)
  local ends = text and tonumber(call('ZSCORE', holders, name) or 0) or 0
  if ends > OF_KEYS then ends = ends - OF_KEYS end
  if ends > 0 then used = used - (parse(text) or 0) end
  if ends > now then limits[#limits + 1], limits[#limits + 2], limits[#limits + 3] = name, ends, text end
end

-- The rank of the first live holder after the previous page; the last holder of that page may be gone or renewed since.
local first = call('ZCOUNT', holders, '-inf', now)
if after_deadline then
  if tonumber(call('ZSCORE', holders, after_ticket) or 0) == after_deadline then
    first = math.max(first, call('ZRANK', holders, after_ticket) + 1)
  else
    first = math.max(first, call('ZCOUNT', holders, '-inf', format('(%.17g', after_deadline)))
  end
end
local held, listed, permits = {}, 0, 0
local live = most_holders > 0 and call('ZRANGE', holders, first, first + math.min(most_holders, PAGE) - 1, 'WITHSCORES') or {}
for i = 1, #live, 2 do
  if bytes <= 0 then break end
  local text = call('HGET', state, 't' .. live[i]) or ''
  after_deadline, after_ticket = tonumber(live[i + 1]), live[i]
  local ends = after_deadline < OF_KEYS and after_deadline or after_deadline - OF_KEYS
  if ends > now then
    local is_lost = string.find(after_ticket, '^\255%?') -- its record is
    held[#held + 1], held[#held + 2], held[#held + 3] = is_lost and string.sub(after_ticket, 3) or after_ticket, ends, is_lost and '' or text
    bytes = bytes - #after_ticket - #text
  end
  listed = listed + 1
  if not is_limit(after_ticket) then permits = permits + 1 end
end
local more = permits < most_holders and first + listed < call('ZCARD', holders)

-- Returns the record of a waiter unless it is dead, and whether it can be read: what is damaged is listed, and does not count.
local function waiter(ticket)
  local text = call('HGET', state, 't' .. ticket) or ''
  local _, _, _, _, place, request = parse(text)
  return (not place or lasts(place, request)) and text, place
end

local queued, seen = {}, 0
listed = 0
-- The rank after the last entry of the previous page, which may be gone or have another score since.
first = 0
if after_entry then
  local score = call('ZSCORE', queue, after_entry)
  first = score == after_score and call('ZRANK', queue, after_entry) + 1 or call('ZCOUNT', queue, '-inf', '(' .. after_score)
end
for i, entry in ipairs(call('ZRANGE', queue, first, first + math.min(most_waiters, PAGE) + PAGE)) do
  if bytes <= 0 or listed >= most_waiters then break end
  local ticket = ticket_of(entry)
  local text = waiter(ticket)
  if text then
    queued[#queued + 1], queued[#queued + 2] = ticket, text
    bytes, listed = bytes - #ticket - #text, listed + 1
  end
  seen = i
end
if seen > 0 then
  local last = call('ZRANGE', queue, first + seen - 1, first + seen - 1, 'WITHSCORES')
  after_entry, after_score = last[1], last[2]
end
more = more or (listed < most_waiters and first + seen < queue_length)

local waiting, checked = 0, more and {} or call('ZRANGE', queue, 0, PAGE - 1)
for i, entry in ipairs(checked) do
  if waiting >= tonumber(ARGV[8]) then
    waiting = waiting + #checked - i + 1
    break
  end
  local text, place = waiter(ticket_of(entry))
  if text and place then waiting = waiting + 1 end
end
waiting = waiting + queue_length - #checked
local after = {}
if more then
  after = {after_deadline and format('%.17g', after_deadline) or '', after_ticket, after_entry and after_score .. ' ' .. after_entry or ''}
end
return {tag, now, fence, capacity, math.max(0, used), waiting, held, queued, after, limits}
