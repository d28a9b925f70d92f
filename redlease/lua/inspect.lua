-- inspect: returns a snapshot of the resource, or a page of it, without expired entries. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag most_holders most_waiters bytes after_deadline after_ticket after_sequence
--       (bytes: the approximate size limit of the reply; the last three: where the previous page ended, "" for the first)
-- Reply: {tag, now, fence, capacity, in_use, waiting, {ticket, deadline, record, ...}, {ticket, record, ...}, {deadline, ticket,
--        sequence}}; the last list is the last three arguments of the next page, {} if there is none
--        (waiting: live waiters, counted up to `most_waiters` + 1, and past at most 5,000 dead ones)
-- Cost: O(b + log n) for a reply of b entries.
local tag, most_holders, most_waiters, bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local after_deadline, after_ticket, after_sequence = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])

--#include state
--#include queue
read('')
local PAGE = 50 * BATCH
for _, ticket in ipairs(call('ZRANGEBYSCORE', holders, '-inf', now, 'LIMIT', 0, BATCH * 10)) do
  local text = call('HGET', state, 't' .. ticket)
  used = used - (text and parse(text) or 1)
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
local held, listed = {}, 0
local live = most_holders > 0 and call('ZRANGE', holders, first, first + math.min(most_holders, PAGE) - 1, 'WITHSCORES') or {}
for i = 1, #live, 2 do
  if bytes <= 0 then break end
  local text = call('HGET', state, 't' .. live[i]) or ''
  after_deadline, after_ticket = tonumber(live[i + 1]), live[i]
  held[#held + 1], held[#held + 2], held[#held + 3] = after_ticket, after_deadline, text
  bytes, listed = bytes - #after_ticket - #text, listed + 1
end
local more = listed < most_holders and first + listed < call('ZCARD', holders)

local queued, waiting, seen = {}, 0, 0
first = after_sequence and call('ZCOUNT', queue, '-inf', format('%.17g', after_sequence)) or 0
for i, ticket in ipairs(call('ZRANGE', queue, first, first + math.min(most_waiters, PAGE) + PAGE)) do
  if bytes <= 0 then break end
  local text = call('HGET', state, 't' .. ticket) or ''
  local _, _, _, _, place, request = parse(text)
  if place and lasts(place, request) then
    waiting = waiting + 1
    if waiting > most_waiters then break end
    queued[#queued + 1], queued[#queued + 2] = ticket, text
    bytes = bytes - #ticket - #text
  end
  seen = i
end
if seen > 0 then
  after_sequence = tonumber(call('ZRANGE', queue, first + seen - 1, first + seen - 1, 'WITHSCORES')[2])
end
more = more or (waiting < most_waiters and first + seen < call('ZCARD', queue))
local after = {}
if more then
  for i, value in ipairs({after_deadline or '', after_ticket, after_sequence or ''}) do
    after[i] = type(value) == 'number' and format('%.17g', value) or value
  end
end
return {tag, now, fence, capacity, math.max(0, used), waiting, held, queued, after}
