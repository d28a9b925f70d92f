-- limits: adapts the limits of a resource to a new capacity. scripts.py puts it where operations say `--#include limits`.
-- A limit of so many units is held like a permit for all other units, by an entry of its own among the holders, whose name begins with
-- a byte that no ticket contains, and whose record has the units in the place of the lease. So whatever grants, queues, waits for an
-- expiry or reaps does the same with it. A limit for keys has no weight: it is looked at where a key's units are, in turns.lua.
for _, kind in ipairs({'limit', 'pause', 'back', 'rate'}) do
  local name = string.char(255) .. kind
  local its_weight, _, units, since, _, _, label = parse(call('HGET', state, 't' .. name) or '')
  if its_weight and call('ZSCORE', holders, name) then
    local its_new = math.max(0, capacity - units)
    used, excess = used + its_new - its_weight, excess + its_new - its_weight
    call('HSET', state, 't' .. name, format('%d 0 %s %s - - ', its_new, units, since) .. label)
  end
end
