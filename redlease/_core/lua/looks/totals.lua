-- totals: returns a resource in numbers, for lists of many resources: cheaper than inspect. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag most
--       (most: how many holders, and how many waiters if clients have died, are looked at one by one)
-- Reply: {tag, now, fence, capacity, in_use, waiting, held_since, queued_since, history, limit}
--        (held_since, queued_since: of the longest holder and of the first live waiter that were looked at, 0 if there is none;
--        waiting: may count waiters whose client died more than a minute ago until the queue reaches them; history: how many entries
--        of history are kept; limit: how many units may be held by the limits that operators have set, -1 if none is)
-- Cost: O(m + log n) with m looked at.
local tag, most = ARGV[1], tonumber(ARGV[2])
local was = read_header('fence', 'capacity', 'excess', 'lock_delay', 'history', 'expires')
local expires = tonumber(was.expires or 0)
--#include form
local units, held_since, queued_since = 0, 0, 0
local rest = 0 -- how many more are looked at; one with a large record counts as several

local function stored(ticket)
  local text = call('HGET', state, 't' .. ticket) or ''
  rest = rest - 1 - math.floor(#text / 1024)
  return text
end

-- What the limits of the resource keep from others, nobody uses; see parts/limits.lua.
local limit, kept = -1, 0
for _, kind in ipairs({'limit', 'pause', 'back', 'rate'}) do
  local name = string.char(255) .. kind
  local weight, its_limit = string.match(call('HGET', state, 't' .. name) or '', '^(%d+) 0 (%d+)')
  local ends = weight and tonumber(call('ZSCORE', holders, name) or 0) or 0
  if ends > 0 then kept = kept + weight end
  if ends > now and kind ~= 'rate' and (limit < 0 or tonumber(its_limit) < limit) then limit = tonumber(its_limit) end
end

-- A holder whose lease has ended counts while its lock delay lasts; an entry that stands for a delay counts and holds nothing.
local delay = tonumber(was.lock_delay or 0)
local live = call('ZRANGEBYSCORE', holders, format('(%d', now - delay), '(4503599627370496', 'WITHSCORES', 'LIMIT', 0, most) -- below OF_KEYS
rest = most
for i = 1, #live, 2 do
  if rest <= 0 then break end
  local weight, its_fence, since = string.match(stored(live[i]), '^(%d+) (%d+) %d+ (%d+)')
  local counts, since_ms = tonumber(live[i + 1]) > now, tonumber(since or 0)
  local is_limit = string.find(live[i], '^\255%a')
  if not is_limit and (counts or string.byte(live[i]) ~= 255) then units = units + (weight or 1) end
  if counts and its_fence ~= '0' and (held_since == 0 or since_ms < held_since) then held_since = since_ms end
end
if #live >= 2 * most or rest <= 0 then units = math.max(0, call('ZCARD', holders) + (was.excess or 0) - kept) end

local waiting = call('ZCARD', queue)
local lapses = waiting > 0 and call('ZRANGEBYSCORE', waiters, '(0', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
local dead = lapses and tonumber(lapses) <= now -- some places at least: which of the waiters are dead is to be seen
if not lapses then waiting = 0 end
rest = most
for i, entry in ipairs(waiting > 0 and call('ZRANGE', queue, 0, dead and most - 1 or 0) or {}) do
  if rest <= 0 then break end
  local ticket = string.byte(entry) == 255 and string.sub(entry, 19) or entry -- see parts/turns.lua
  local since, place, request = string.match(stored(ticket), '^%d+ %d+ %d+ (%d+) (%S+) (%S+)')
  local alive = place and not dead
  for other in string.gmatch(dead and place and '{' .. place .. '}' .. request or '', '{([^}]*)}') do
    local its_end = call('ZSCORE', waiters, other)
    alive = alive or (its_end and tonumber(its_end) > now)
  end
  if not alive then
    waiting = waiting - 1
  elseif queued_since == 0 then
    queued_since = tonumber(since)
  end
end
return {tag, now, tonumber(was.fence or 0), tonumber(was.capacity or 0), units, waiting, held_since, queued_since, tonumber(was.history or 0), limit}
