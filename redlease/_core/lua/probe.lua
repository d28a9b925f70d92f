-- probe: tries every command that the operations use, on keys of its own, and returns the errors, such as missing permissions.
-- KEYS: state holders queue waiters
-- ARGV: tag
-- Reply: {tag, error, ...}: the text of each error, none if all commands are allowed
-- Cost: O(1).
local failed = {ARGV[1]}
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then failed[#failed + 1] = string.lower((...)) .. ': ' .. reply.err end
end
try('HSET', KEYS[1], 'f', '0')
try('HMGET', KEYS[1], 'f')
try('HGET', KEYS[1], 'f')
try('HLEN', KEYS[1])
try('HKEYS', KEYS[1])
try('HDEL', KEYS[1], 'f')
for i = 2, 4 do
  try('ZADD', KEYS[i], 1, 'm')
  try('ZSCORE', KEYS[i], 'm')
  try('ZRANK', KEYS[i], 'm')
  try('ZCARD', KEYS[i])
  try('ZCOUNT', KEYS[i], '-inf', '+inf')
  try('ZRANGE', KEYS[i], 0, 0)
  try('ZRANGEBYSCORE', KEYS[i], '-inf', '+inf', 'LIMIT', 0, 1)
  try('ZREM', KEYS[i], 'm')
  try('ZREMRANGEBYSCORE', KEYS[i], '-inf', '+inf')
  try('PEXPIREAT', KEYS[i], 1)
end
try('PEXPIREAT', KEYS[1], 1)
try('TIME')
return failed
