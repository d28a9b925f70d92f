-- share: tickets that several requests share, and the removal of old entries. scripts.py puts it where operations say `--#include share`.
-- The functions are in one table: each local of a script makes every call of it allocate more.

local share = {most = 100} -- how many requests can share the ticket of a permit

-- Removes a request from a record or, with a `place`, puts it first. Returns the new place and request of the record, nil if no
-- request is left, and whether the request was in it before.
-- Of waiters (`waits`), only live ones stay, and of the calling client only this request, since it waits once with a ticket. For
-- a permit, the calling client keeps this request and one earlier one, which stands for all permits that it got as data. A
-- request beyond the limit is removed, and its client is notified that it has lost the permit.
function share.changed(its_place, its_request, request, place, waits)
  local channel, found, own, was_there = place and string.match(place, '^[^|]*'), {}, nil, false
  for other_place, other in string.gmatch('{' .. its_place .. '}' .. its_request, '{([^}]*)}([^{]*)') do
    if other == request then
      was_there = true
    elseif string.match(other_place, '^[^|]*') == channel then
      own = not waits and {other_place, other}
    elseif not waits or alive(other_place) then
      found[#found + 1] = {other_place, other}
    end
  end
  if place and not waits and #found >= share.most then
    local last = table.remove(found, #found - 1) -- neither the first nor one of the newest
    publish(last[1], 'x ' .. last[2])
  end
  if own then found[#found + 1] = own end
  local text = place and request
  for _, other in ipairs(found) do
    if not place then
      place, text = other[1], other[2]
    else
      text = text .. '{' .. other[1] .. '}' .. other[2]
    end
  end
  return place, text, was_there
end

-- Returns whether that request is one of a record's.
function share.has(requests, request)
  return string.find('}' .. requests .. '{', '}' .. request .. '{', 1, true)
end

-- Returns true for a late copy: its client has sent that request from a newer place since.
function share.is_late(its_place, its_request, request, place)
  local channel, epoch = string.match(place, '^([^|]*)|?(%d*)$')
  for other_place, other in string.gmatch('{' .. its_place .. '}' .. its_request, '{([^}]*)}([^{]*)') do
    local its_channel, its_epoch = string.match(other_place, '^([^|]*)|?(%d*)$')
    if other == request and its_channel == channel and (tonumber(its_epoch) or 0) > (tonumber(epoch) or 0) then return true end
  end
end

function share.record(weight, its_fence, lease, since, place, request, label)
  local first = string.find(request, '{', 1, true) and '0' or ''
  return format('%s%d %s %d %d %s %s %s', first, weight, its_fence, lease, since, place, request, label)
end

-- Returns whether that request is in a record, and the record without it, nil if no other request is left.
function share.left(text, request)
  local weight, its_fence, lease, since, its_place, its_request, label = parse(text)
  local place, others, was_there = share.changed(its_place, its_request, request)
  return was_there, place and share.record(weight, its_fence, lease, since, place, others, label)
end

-- Removes tombstones that have ended and places that lapsed long ago, one batch of each.
function share.forget()
  for _, ends in ipairs({{-now, 0}, {'(0', now - FORGET_MS}}) do
    local over = call('ZRANGEBYSCORE', waiters, ends[1], ends[2], 'LIMIT', 0, BATCH)
    if #over > 0 then call('ZREM', waiters, (unpack or table.unpack)(over)) end
  end
end
