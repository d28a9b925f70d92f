-- inspect: returns a snapshot of the resource, or a page of it, without expired entries. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag most_holders most_waiters bytes after_deadline after_ticket after_entry most_counted
--       (bytes: the approximate size limit of the reply; the next three: where the previous page ended, "" for the first;
--       most_counted: past so many live waiters the others are counted without a look at them. Subtract from the three numbers what
--       the pages before have listed and counted)
-- Reply: {tag, now, fence, capacity, in_use, waiting, {ticket, deadline, record, ...}, {ticket, record, ...}, {deadline, ticket,
--        entry}, {name, deadline, record, ...}}; the last list but one is the last three arguments of the next page, {} if there is
--        none; the last one is the limits of the resource, those of keys are among the holders, see parts/limits.lua
--        (in_use: the weights of all holders; those with fence 0 stand for a lock delay or a limit; waiting: how many wait. Add both up
--        over the pages: the first one tells the units in use, from which each page subtracts those of the expired permits that it met)
-- Cost: O(b + log n) for b entries that it looks at: 150 at most, and fewer with large metadata.
local tag, most_holders, most_waiters, bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local after_deadline, after_ticket, most_counted = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[8])
local after_score, after_entry = string.match(ARGV[7], '^(%S+) (.*)$')

--#include state
read('')
--#include form
--#include queue
--#include behind
local rest = 150 -- what a page looks at: an entry counts as one, and as one more for each 1,024 bytes
local is_first = not after_deadline and not after_entry
local count, queue_length = used - excess, call('ZCARD', queue)
local is_damaged = call('HLEN', state) ~= was.count + count + queue_length + turns.count + turns.keys
if is_damaged then used = count end -- what the header tells of them may be wrong, see parts/repair.lua
if not is_first then used = 0 end

local function stored(ticket)
  local text = call('HGET', state, 't' .. ticket) or ''
  rest = rest - 1 - #text / 1024
  return text
end

local function is_limit(name)
  return string.find(name, '^\255%a')
end

-- The limits of the resource: what they keep from others, nobody uses.
local limits, names = {}, {'\255limit', '\255pause', '\255back', '\255rate', '\255each'}
for _, name in ipairs(names) do
  local text = call('HGET', state, 't' .. name)
  local ends = text and tonumber(call('ZSCORE', holders, name) or 0) or 0
  if ends > OF_KEYS then ends = ends - OF_KEYS end
  if ends > 0 and is_first then used = used - (is_damaged and 1 or string.match(text, '^%d+') or 0) end
  if ends > now then limits[#limits + 1], limits[#limits + 2], limits[#limits + 3] = name, ends, text end
end

-- The holders: first those that have expired and that no call has removed yet; with a lock delay their units are in use.
local at = after_deadline and behind(holders, after_ticket, ARGV[5]) or 0
local held, permits, delay, is_enough, met = {}, 0, tonumber(was.lock_delay or 0), false, 0
-- Who was granted while the pages of waiters are read is not listed: the units in use are those of the first page.
local listed = after_entry and {} or call('ZRANGE', holders, at, at + rest, 'WITHSCORES')
for i = 1, #listed, 2 do
  local name, ends = listed[i], tonumber(listed[i + 1])
  is_enough = ends > now and permits >= most_holders
  if is_enough or rest <= 0 or bytes <= 0 then break end
  after_deadline, after_ticket, at = ends, name, at + 1
  local text = stored(name)
  local weight = is_limit(name) and 0 or tonumber(string.match(text, '^%d+') or 1)
  if ends <= now then
    local is_over = string.byte(name) == 255 or ends + delay <= now
    if is_over then used = used - (is_damaged and math.min(1, weight) or weight) else met = met + weight end
  else
    if ends > OF_KEYS then ends = ends - OF_KEYS end
    if ends > now then
      local is_lost = string.find(name, '^\255%?') -- its record is
      held[#held + 1], held[#held + 2], held[#held + 3] = is_lost and string.sub(name, 3) or name, ends, is_lost and '' or text
      bytes, met = bytes - #name - #text, met + weight
    end
    if not is_limit(name) then permits = permits + 1 end
  end
end
if is_first and at >= count then used = met end -- it has come by all of them
local is_last = after_entry or is_enough or at >= count

local queued, waiting = {}, 0
if is_last then
  at, is_enough = after_entry and behind(queue, after_entry, after_score) or 0, false
  listed = call('ZRANGE', queue, at, at + math.max(0, math.floor(rest)), 'WITHSCORES')
  for i = 1, #listed, 2 do
    is_enough = #queued >= 2 * most_waiters and waiting >= most_counted
    if is_enough or rest <= 0 or bytes <= 0 then break end
    after_entry, after_score, at = listed[i], listed[i + 1], at + 1
    local ticket = ticket_of(after_entry)
    local text = stored(ticket)
    local place, request = string.match(text, '^%d+ %d+ %d+ %d+ (%S+) (%S+)')
    if not place or lasts(place, request) then
      if place then waiting = waiting + 1 end -- what is damaged is listed, and does not count
      if #queued < 2 * most_waiters then
        queued[#queued + 1], queued[#queued + 2] = ticket, text
        bytes = bytes - #ticket - #text
      end
    end
  end
  if is_enough then waiting = waiting + queue_length - at end
  is_last = is_enough or at >= queue_length
end

local after = {}
if not is_last then
  after = {after_deadline and format('%.17g', after_deadline) or '', after_ticket, after_entry and after_score .. ' ' .. after_entry or ''}
elseif is_first then
  used = math.max(0, used)
end
return {tag, now, fence, capacity, used, waiting, held, queued, after, limits}
