-- progress: returns how far a sequence is, and the results of its items from one on. Writes nothing.
-- KEYS: state holders queue waiters checkpoints
-- ARGV: tag first bytes
--       (bytes: the approximate size limit of the results; 0: none are wanted)
-- Reply: {tag, total, handled, error, result, ...}; total 0 if there is no such sequence; error "" if there is none
-- Cost: O(r) for r results.
local tag, first, bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local checkpoints = KEYS[5]

local known = call('HMGET', checkpoints, 'total', 'handled', 'error')
local handled = tonumber(known[2] or 0)
local reply = {tag, tonumber(known[1] or 0), handled, known[3] or ''}
for index = first, handled - 1 do
  if bytes <= 0 then break end
  local result = call('HGET', checkpoints, format('%d', index))
  reply[#reply + 1] = result
  bytes = bytes - 100 - #result -- a reply of short results is bounded too
end
return reply
