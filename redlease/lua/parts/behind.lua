-- behind: says where a look at the queue goes on that came to an entry before. scripts.py puts it where operations say `--#include behind`.
-- Returns the rank behind an entry, which may be gone.
local function behind(entry, score)
  if call('ZSCORE', queue, entry) == score then return call('ZRANK', queue, entry) + 1 end
  local low, high = call('ZCOUNT', queue, '-inf', '(' .. score), call('ZCOUNT', queue, '-inf', score)
  while low < high do -- entries of one score are in the order of their names
    local middle = math.floor((low + high) / 2)
    if call('ZRANGE', queue, middle, middle)[1] > entry then high = middle else low = middle + 1 end
  end
  return low
end
