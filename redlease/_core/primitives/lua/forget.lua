-- forget: removes a sequence, held or not.
-- KEYS: state holders queue waiters checkpoints
-- ARGV: tag
-- Reply: {tag, was_there}
-- Cost: O(n) with n results.
local tag = ARGV[1]
local checkpoints = KEYS[5]

return {tag, call('PEXPIREAT', checkpoints, 1)} -- in the past: it expires now
