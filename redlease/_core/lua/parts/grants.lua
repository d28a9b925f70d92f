-- grants: makes holders, no faster than the rate allows. scripts.py puts it where operations say `--#include grants`, and before the queue.

-- Should no token be left, nothing is granted until the next one is due: a limit of 0 units until then, see parts/limits.lua, which
-- whoever waits times its calls by. It is written at once: reaping in this call counts it.
local function await_token()
  local due_us = rate.tat - (rate.burst - 1) * rate.interval
  if due_us <= clock[1] * 1000000 + clock[2] then return end
  local name, due = string.char(255) .. 'rate', math.ceil(due_us / 1000)
  rate.due = due
  lease_until(name, due)
  used, excess = used + capacity, excess + capacity - 1
  call('HSET', state, 't' .. name, format('%d 0 0 %d - - ["",{}]', capacity, now))
end

-- Adds a holder, who has waited since then; the caller notifies its client.
local function make_holder(ticket, weight, lease, place, request, label, deadline, since)
  lease_until(ticket, deadline)
  used, excess = used + weight, excess + weight - 1
  local first = string.find(request, '{', 1, true) and '0' or '' -- of a shared ticket
  set('t' .. ticket, format('%s%d %s %d %d %s %s %s', first, weight, next_fence(), lease, now, place, request, label))
  note('granted', ticket, format('%d', fence), weight, now - since, label)
  if rate then -- the generic cell rate algorithm (ITU-T I.371): at `tat` all tokens are there again
    rate.tat = math.max(rate.tat, clock[1] * 1000000 + clock[2]) + rate.interval
    set('r', format('%d %d %.0f', rate.interval, rate.burst, rate.tat))
    await_token()
  end
end
