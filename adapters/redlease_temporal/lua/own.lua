-- own: a relay reads which watches are its own, a page at a time.
-- KEYS: watches owners relays
-- ARGV: tag relay after
--       (after: the last watch of the page before, empty for the first page)
-- Reply: {tag, more, watch, text, ...}; more 1 when there may be further ones: a page has at most 1000
-- Cost: O(log n) for each watch.
local tag, relay, after = ARGV[1], ARGV[2], ARGV[3]
local watches, owners, relays = KEYS[1], KEYS[2], KEYS[3]

-- "!" comes right after the space that ends a relay's name.
local first, past = '(' .. relay .. ' ' .. after, '(' .. relay .. '!'
local members = redis.call('ZRANGEBYLEX', owners, first, past, 'LIMIT', 0, 1000)
local reply = {tag, #members == 1000 and 1 or 0}
for _, member in ipairs(members) do
  local watch = string.sub(member, #relay + 2)
  local owner, text = string.match(redis.call('HGET', watches, watch) or '', '^(%S+) (.*)$')
  if owner == relay then
    reply[#reply + 1], reply[#reply + 2] = watch, text
  else
    redis.call('ZREM', owners, member)
  end
end
return reply
