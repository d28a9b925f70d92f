-- header: the names of the header's fields. It is not sent: scripts.py replaces `read_header('fence', ...)` with an HMGET of these fields, and
-- `was.fence` with the position of that field in the reply.
return {
  fence = 'f', -- the last one
  sequence = 's', -- the last one
  capacity = 'c',
  declared = 'd', -- the capacity that was declared last
  excess = 'e', -- units in use minus number of holders
  expires = 'k', -- when the keys expire, as all times in ms of the server's clock
  tombstones = 'x', -- when the last tombstone ends
  watched = 'w', -- until when a client watches
  seen_alive = 'l', -- since when all waiters of a full queue were found alive, see room.lua
  lock_delay = 'y', -- in ms
  mean_hold = 'h', -- how long holds lasted lately whose release others waited for, in ms
  history = 'n', -- how many entries of history are kept
  rate = 'r', -- of grants, see acquire.lua
  per_key = 'b', -- how many units one key may have, and the rate of each key, see acquire.lua
  notified = 'o', -- which waiter was last notified of when to call
  checked = 'v', -- when all was last found to fit together, see repair.lua
  turns = 'g', -- see turns.lua
  record = 't' .. ticket, -- not of the header, but read with it: the record of the ticket that the call is about

  -- What the scripts note in the same table, under these names:
  ticket = NOTE, -- whose record was read
  count = NOTE, -- how many fields of the header there are
  is_due = NOTE, -- whether a check of everything is
  has_begun = NOTE, -- whether this call has deleted field e, see `writes` in state.lua
  stored = NOTE, -- how many fields the state has
  waiting = NOTE, -- how many tickets the queue has
  is_damaged = NOTE, -- whether the sums differ, see repair.lua
}
