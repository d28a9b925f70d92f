-- prelude: the common head of all operations. scripts.py puts it before each of them; it is not an operation itself. Functions
-- are in state.lua, queue.lua and share.lua, which the operations include where they need them: creating a closure with many
-- upvalues costs as much as a command, so a call that returns before the include is twice as fast. That is why acquire and
-- release begin with a fast path for the usual case, written without functions, and handle all other cases after it.
--
-- A resource is four keys under one hash tag, declared by every call in this order:
--   KEYS[1] state    hash  the header, see header.lua; l<key>, see room.lua; p<ticket> and q<key>, see turns.lua; and t<ticket>,
--                          one record each
--   KEYS[2] holders  zset  ticket -> the time its lease ends; \255<deadline> <ticket> -> the time its lock delay ends; \255<kind> and
--                          \255<kind> <key> -> the time that limit ends, plus 2^52 if it is one of keys; \255?<ticket> -> the time the lease
--                          would end of a permit whose record was lost
--   KEYS[3] queue    zset  ticket -> its sequence, the order of arrival, less ten for each step of its priority
--   KEYS[4] waiters  zset  place -> the time it lapses; "!"<request> -> the time that tombstone ends, negated
-- and, if n is set, the stream <prefix>:{name}:history of what happened: e event, t ticket, f fence, w weight, m ms waited or held,
-- o owner and k key, if there is one, in JSON. It is not declared: a cluster refuses a call of which some keys exist and some do not while the slot moves.
-- A record is "weight fence lease since place request label": fence 0 while queued, since = when it was queued or granted,
-- place = <channel>|<epoch> of the requesting client, label = owner, metadata and key as the client wrote them, which nothing but repair.lua reads.
-- A fence that begins with a zero is that of a permit which a newer request has replaced, see supersede.lua.
-- A ticket used by several requests is shared: its weight begins with a zero, which excludes it from the fast paths, and its
-- request is followed by the older ones, newest first, each as {place}request.
--
-- All keys expire at the same time, so that none outlives the keys it depends on.
-- Redis may lose any key, field or member alone. So a script takes what is missing for what it means without it, and repair.lua, which
-- all that write begin with, finds the loss. An error may stop a script between any two of its commands: e is missing until all that belongs together is written. The fast paths need e and c, and an e that is not negative: a lost entry without
-- weight would have them grant too much.
-- This is form 1 of what is stored. A later form has minus its number in k, with which no fast path goes on and all others refuse.
--
-- Units in use = number of holders + e. e changes only when a holder is added or removed. An expired
-- holder counts until it is reaped, and every call reaps before it refuses or queues a request for lack of capacity.
-- Between two calls the head of the queue does not fit; only a grant, an expiry or a new capacity can change that.
-- Fences are passed to redis.call as strings made here: Lua's own conversion would round them to 14 digits.


local GRANTED, QUEUED, BUSY, FULL, MISFIT, OTHER_WEIGHT, WITHDRAWN, LAPSED = 1, 2, 3, 4, 5, 6, 7, 8
local state, holders, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call, format = redis.call, string.format
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
