-- deliver: publishes an empty message to a channel of this client, so that it learns whether messages arrive.
-- KEYS: state holders queue waiters
-- ARGV: tag channel
-- Reply: {tag, error}: the text of the error, empty if there is none
-- Cost: O(1).
local channel = ARGV[2]
local reply
if string.sub(channel, 1, 1) == ':' then -- see `publish` in state.lua
  channel = KEYS[1] .. channel
  reply = redis.pcall('SPUBLISH', channel, '')
end
if not reply or (type(reply) == 'table' and reply.err) then reply = redis.pcall('PUBLISH', channel, '') end
return {ARGV[1], type(reply) == 'table' and reply.err or ''}
