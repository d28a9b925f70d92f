-- checkpoint: begins a sequence, or records the result of its next item or why that failed, if the permit is held now.
-- KEYS: state holders queue waiters checkpoints
-- ARGV: tag ticket fence items total index result error keep_ms
--       (items: a digest of all items; index: -1 begins the sequence unless it has begun; result: "" if the item failed)
-- Reply: {tag, held, handled}; handled: items done, -1 if the sequence is one of other items, or is gone
-- Cost: O(1).
--
-- A sequence is a hash: items, total, handled (items done), error (why the next item failed last), expires (when the key
-- does, in ms of the server's clock), and the result of each item that is done, by its index. A checkpoint is written only
-- by the holder and only at `handled`, so each is written once and in order; a repeated call finds it written.
local tag, ticket, its_fence, items, total = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local index, result, why, keep = tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])
local checkpoints = KEYS[5]

--#include state
read(ticket)
--#include form
local _, held_fence = parse(record or '')
local deadline = held_fence == its_fence and call('ZSCORE', holders, ticket)
if not deadline or tonumber(deadline) <= now then return {tag, 0, 0} end

local known = call('HMGET', checkpoints, 'items', 'handled', 'expires')
local handled = tonumber(known[2] or 0)
local is_new = index < 0 and not known[1]
if not is_new and (known[1] ~= items or index > handled) then return {tag, 1, -1} end
if index < 0 and handled == tonumber(total) then return {tag, 1, handled} end -- nothing is left to do: it expires when it would

local due = format('%d', math.max(tonumber(known[3] or 0), now + keep))
-- A full server allows this write, and then what follows: it refuses to begin, but work that was done is recorded.
if index == handled then call('HDEL', checkpoints, 'error') end
if is_new then
  call('HSET', checkpoints, 'items', items, 'total', total, 'handled', '0', 'expires', due)
elseif index == handled and result ~= '' then
  handled = handled + 1
  call('HSET', checkpoints, ARGV[6], result, 'handled', format('%d', handled), 'expires', due)
elseif index == handled then
  call('HSET', checkpoints, 'error', why, 'expires', due)
else
  call('HSET', checkpoints, 'expires', due)
end
call('PEXPIREAT', checkpoints, due)
return {tag, 1, handled}
