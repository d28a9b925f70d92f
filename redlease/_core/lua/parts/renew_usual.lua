-- renew_usual: what is usual: the permit is held, its lease has the length that it had and ends no earlier than before, and
-- the keys outlive it. Written without functions, for speed: the general path, which follows it in renew.lua, has the same effect.
local was = read_header('capacity', 'expires', 'record')
local held_fence, its_lease = string.match(was.record or '', '^%d+ (%d+) (%d+) ')
local ends = held_fence == its_fence and was.expires and tonumber(call('ZSCORE', holders, ticket))
local deadline = now + lease
if ends and ends > now and (ends < deadline or ends == deadline and shorten ~= 'write') and its_lease == ARGV[4]
  and tonumber(was.expires) >= math.max(now + idle, deadline) then
  local waiting = call('ZCARD', queue)
  call('HDEL', state, '') -- changes nothing; allowed when out of memory, and so are later writes
  call('ZADD', holders, format('%d', deadline), ticket)
  return {tag, deadline, was.capacity and tonumber(was.capacity) or 0, waiting}
end
