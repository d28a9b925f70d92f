-- list: returns the records that a relay owns, a page at a time.
-- KEYS: records owners relays
-- ARGV: tag relay after
--       (after: the last record of the previous page, empty for the first)
-- Reply: {tag, more, record, text, ...}; more 1 if there may be more: a page has at most 1000 records, and about 500 kB
-- Cost: O(log n) for each record.
local tag, relay, after = ARGV[1], ARGV[2], ARGV[3]
local records, owners, relays = KEYS[1], KEYS[2], KEYS[3]

-- "!" sorts right after the space that ends a relay's name.
local first, past = '(' .. relay .. ' ' .. after, '(' .. relay .. '!'
local members = redis.call('ZRANGEBYLEX', owners, first, past, 'LIMIT', 0, 1000)
local reply, bytes = {tag, #members == 1000 and 1 or 0}, 0
for _, member in ipairs(members) do
  if bytes > 500000 then -- Redis closes a connection whose replies become too large
    reply[2] = 1
    break
  end
  local record = string.sub(member, #relay + 2)
  local owner, text = string.match(redis.call('HGET', records, record) or '', '^(%S+) (.*)$')
  if owner == relay then
    reply[#reply + 1], reply[#reply + 2] = record, text
    bytes = bytes + #text
  else
    redis.call('ZREM', owners, member)
  end
end
return reply
