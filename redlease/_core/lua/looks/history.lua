-- history: returns the newest entries of the history, newest first, or those before an entry. Writes nothing.
-- KEYS: state holders queue waiters
-- ARGV: tag before most
--       (before: the id of an entry, "" for the newest)
-- Reply: {tag, {id, {field, value, ...}}, ...}: each entry with the fields that prelude.lua names
-- Cost: O(n) for n entries returned.
local reply = {ARGV[1]}
local history = string.sub(state, 1, -6) .. 'history'
local last = ARGV[2] == '' and '+' or '(' .. ARGV[2]
for i, entry in ipairs(call('XREVRANGE', history, last, '-', 'COUNT', ARGV[3])) do reply[i + 1] = entry end
return reply
