-- prelude: what every operation stands on. wire.py puts it before each of them; it is no operation itself. Functions
-- stand in state.lua and queue.lua, which the operations include where they need them: making a closure with many
-- upvalues costs as much as a command, so that a call which ends before them is twice as fast. That is why acquire and
-- release begin with what is usual, written out without functions, and leave all else to the general way behind it.
--
-- A resource is four keys under one hash tag, declared by every call in this order:
--   KEYS[1] state    hash  f last fence, s last sequence, c capacity, d declared capacity, e units in use beyond one a
--                          holder; moments in ms of the server's clock: k when the keys expire, x until when a tombstone stands, w until when
--                          somebody watches; and t<ticket>, a record each
--   KEYS[2] holders  zset  ticket -> the moment its lease ends
--   KEYS[3] queue    zset  ticket -> its sequence, the order of arrival
--   KEYS[4] waiters  zset  place -> the moment it lapses; "!"<request> -> the moment that tombstone ends
-- A record is "weight fence lease since place request label": fence 0 while queued, since = when it was queued or granted,
-- place = <channel>|<epoch> of the client that asks, label = what the client wrote (owner and metadata), never read here.
--
-- All four keys expire at the same moment, so that none outlives what it needs of the others.
-- Units in use are the holders and e, which changes only where a holder is added or removed; reaping counts it anew. A
-- lapsed holder counts until it is reaped, and it is reaped before anybody is refused or queued because of it.
-- Between two calls the head of the queue does not fit; only a grant, a lapse or a new capacity can change that.
-- A fence reaches redis.call as a string made here: Lua's own conversion would round it to 14 digits.


local GRANTED, QUEUED, BUSY, FULL, MISFIT, OTHER_WEIGHT, WITHDRAWN, LAPSED = 1, 2, 3, 4, 5, 6, 7, 8
local state, holders, queue, waiters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call, format = redis.call, string.format
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
