-- deliver: publishes an empty message to a channel of this client, so that it learns whether messages arrive.
-- KEYS: state holders queue waiters
-- ARGV: tag channel
-- Reply: {tag, error}: the text of the error, empty if there is none
-- Cost: O(1).
local function failure_of(...)
  local reply = redis.pcall(...)
  return type(reply) == 'table' and reply.err or ''
end
local channel = ARGV[2]
if string.sub(channel, 1, 1) ~= ':' then return {ARGV[1], failure_of('PUBLISH', channel, '')} end
channel = KEYS[1] .. channel -- see `publish` in state.lua
local failure = failure_of('SPUBLISH', channel, '')
if string.find(string.lower(failure), 'unknown', 1, true) then failure = failure_of('PUBLISH', channel, '') end
return {ARGV[1], failure}
