-- inspect: the resource as it is at this moment; what has lapsed is left out. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag limit
-- Reply: {tag, now, fence, capacity, in_use, waiting, {ticket, deadline, record, ...}, {ticket, record, ...}}
--        (waiting: live waiters, counted no further than `limit` + 1, and behind no more than 5,000 dead ones)
-- Cost: O(limit + log n).
local tag, limit = ARGV[1], tonumber(ARGV[2])

--#include state
--#include queue
read('')
local lapsed = call('ZRANGEBYSCORE', holders, '-inf', now, 'LIMIT', 0, math.max(limit, BATCH))
for _, ticket in ipairs(lapsed) do
  local text = call('HGET', state, 't' .. ticket)
  used = used - (text and parse(text) or 1)
end
local held, queued, waiting = {}, {}, 0
if limit > 0 then
  local live = call('ZRANGEBYSCORE', holders, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #live, 2 do
    held[#held + 1], held[#held + 2], held[#held + 3] = live[i], tonumber(live[i + 1]), call('HGET', state, 't' .. live[i]) or ''
  end
end
for _, ticket in ipairs(call('ZRANGE', queue, 0, limit + 50 * BATCH)) do
  local text = call('HGET', state, 't' .. ticket) or ''
  local _, _, _, _, place = parse(text)
  if place and alive(place) then
    waiting = waiting + 1
    if waiting <= limit then queued[#queued + 1], queued[#queued + 2] = ticket, text end
    if waiting > limit then break end
  end
end
return {tag, now, fence, capacity, math.max(0, used), waiting, held, queued}
