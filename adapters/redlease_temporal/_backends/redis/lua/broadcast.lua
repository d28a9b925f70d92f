-- broadcast: publishes a message to all relays.
-- KEYS: records owners relays
-- ARGV: tag channel message
-- Reply: {tag}
-- Cost: O(n) with n relays.
redis.pcall('PUBLISH', ARGV[2], ARGV[3])
return {ARGV[1]}
