-- supersede: a request that waits takes the place of the others of its key. Those that came before it leave the queue; and, if it
-- replaces holders, permits of its key end, the oldest first, until it fits. The fence in the record of such a permit begins with a zero: it
-- can only be released, under its fence without that, and lasts for the grace time at most.
-- KEYS: state holders queue waiters
-- ARGV: tag ticket request holders tombstone_ms grace_ms idle_ttl_ms after
--       (holders 1: it replaces holders; tombstone_ms: how long requests that left the queue are refused; after: "", or what the
--       reply to the call before says)
-- Reply: {tag, superseded, more, after}; superseded: how many live permits and places; 0 too if that request does not wait; after: ""
--        unless there are holders that it has not looked at, and what it needs is not all found yet
-- Cost: O(log n), and O(log n) for each of at most 16 waiters and permits; it looks at the keys of 500 holders, in the order in which their leases
-- end, and at 100 of its own key, fewer with large metadata. The oldest of those end first.
local tag, ticket, its_request, ends_holders = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local tombstone, idle = tonumber(ARGV[5]), tonumber(ARGV[7])
local PAGE = 500
local was_lacking, after_score, after_name = string.match(ARGV[8], '^(%S+) (%S+) (.*)$')
was_lacking, after_score = tonumber(was_lacking or nil), tonumber(after_score or nil)
local grace = math.max(1, tonumber(ARGV[6])) -- no permit ends in the ms in which it began: its lock delay is named by its ticket and end

--#include state
read(ticket)
--#include form
--#include repair
--#include queue
--#include behind
--#include share
local weight, its_fence, _, queued_at, place, request = parse(record or '')
if its_fence ~= '0' or not share.has(request, its_request) or not lasts(place, request) then return {tag, 0, 0, ''} end
local key, entry = entry_of(ticket)
local score = call('ZSCORE', queue, entry)
if not score then return {tag, 0, 0, ''} end
local earlier = key and turns.before(key, entry) or call('ZRANGEBYSCORE', queue, '-inf', '(' .. score, 'LIMIT', 0, BATCH)
writes.begin()

local superseded, removed = 0, 0
for _, other in ipairs(earlier) do
  if left <= 0 then break end
  local its_entry = other
  other = ticket_of(other)
  local text = call('HGET', state, 't' .. other) or ''
  local its_weight, _, _, since, its_place, requests, label = parse(text)
  left = left - 1 - #text / 2048
  if its_weight and tonumber(since) <= tonumber(queued_at) then -- else it was dead, and left with the one before it; or a priority put it before this one
    if lasts(its_place, requests) then
      superseded = superseded + 1
      note('superseded', other, '0', its_weight, now - since, label)
    end
    for one in string.gmatch('}' .. requests, '}([^{]*)') do
      call('ZADD', waiters, format('-%d.5', now + tombstone - 1), '!' .. one)
    end
    tombstones = math.max(tombstones, now + tombstone)
    set('x', format('%d', tombstones))
    remove_waiter(other, its_entry)
    removed = removed + 1
    publish_to_sharers(its_place, requests, 's', ' ' .. ticket)
  end
end

-- Ends a permit; returns when, and whether that is earlier than before.
local function replace(other)
  local text = call('HGET', state, 't' .. other)
  local its_weight, fence_of_it, _, since, its_place, requests, label = parse(text)
  left = left - 1 - #text / 2048
  call('HSET', state, 't' .. other, (string.gsub(text, '^(%d+ )', '%10')))
  note('superseded', other, fence_of_it, its_weight, now - since, label)
  publish_to_sharers(its_place, requests, 's', ' ' .. ticket)
  superseded = superseded + 1
  local ends = tonumber(call('ZSCORE', holders, other))
  if ends <= now + grace then return ends, false end
  lease_until(other, now + grace)
  return now + grace, true
end

-- Returns a page of holders with false in the place of those of other keys.
local function of_its_key(page)
  if turns.count == 0 or #page == 0 then return page end
  local fields = {}
  for i, name in ipairs(page) do fields[i] = 'p' .. name end
  for i, text in ipairs(call('HMGET', state, (unpack or table.unpack)(fields))) do
    page[i] = (text and string.match(text, '^%S+ %-?%d+ (.*)$') or nil) == key and page[i]
  end
  return page
end

if ends_holders then reap() end
local after = ends_holders and left <= 0 and ARGV[8] or '' -- expired permits may count as used: it is sent again as it was
if ends_holders and left > 0 then
  -- Limits count as far as they last: a pause, the time without a token and that after an answer of a vendor end by themselves.
  local lacking = used + weight - capacity
  for _, kind in ipairs({'pause', 'back', 'rate'}) do
    lacking = lacking - (parse(call('HGET', state, 't' .. string.char(255) .. kind) or '') or 0)
  end
  if key then lacking = math.max(lacking, turns.lacks(key, weight)) end
  if was_lacking then lacking = math.min(lacking, was_lacking) end -- some have been found
  local held, rest, at = {}, BATCH, after_name and behind(holders, after_name, format('%.0f', after_score)) or 0 -- rest: fewer if their records are large
  local page, count = call('ZRANGE', holders, at, at + PAGE - 1), call('ZCOUNT', holders, '-inf', format('(%d', OF_KEYS))
  for i, other in ipairs(of_its_key(page)) do
    if rest <= 0 then break end
    at = at + 1
    if other and string.byte(other) ~= 255 then
      local text = call('HGET', state, 't' .. other) or ''
      local its_weight, fence_of_it = string.match(text, '^(%d+) (%d+) ')
      rest = rest - 1 - #text / 4096
      if its_weight and string.byte(fence_of_it) == 48 then
        lacking = lacking - its_weight
      elseif its_weight then
        held[#held + 1] = {other, tonumber(its_weight), tonumber(fence_of_it)}
      end
    end
  end
  local last = at < count and call('ZRANGE', holders, at - 1, at - 1, 'WITHSCORES')
  table.sort(held, function(one, other) return one[3] < other[3] end)
  local is_any_sooner = false
  for _, one in ipairs(held) do
    if lacking <= 0 or left <= 0 then break end
    lacking = lacking - one[2]
    local ends, is_sooner = replace(one[1])
    is_any_sooner = is_any_sooner or is_sooner
    if after_name and (ends < after_score or (ends == after_score and one[1] < after_name)) then
      was_lacking = was_lacking - one[2] -- it stands before this page from now on
    end
  end
  if lacking > 0 and left <= 0 then
    after = after_name and format('%d %.0f %s', was_lacking, after_score, after_name) or ''
  elseif lacking > 0 and last and (not key or turns.held(key) > 0) then
    after = format('%d %s %s', lacking, last[2], last[1])
  end
  if is_any_sooner then
    publish_to_head()
    if key then turns.tell_next(key) end
  end
end
local more = grant_waiting()
commit(math.max(now, tombstones), idle)
return {tag, superseded, #earlier >= BATCH and removed > 0 and 1 or more, after}
