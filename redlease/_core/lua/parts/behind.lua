-- behind: says where a look at the queue, or at the holders, goes on that came to an entry before. scripts.py puts it where operations say `--#include behind`.
-- Returns the rank behind an entry, which may be gone.
local function behind(entries, entry, score)
  if call('ZSCORE', entries, entry) == score then return call('ZRANK', entries, entry) + 1 end
  local low, high = call('ZCOUNT', entries, '-inf', '(' .. score), call('ZCOUNT', entries, '-inf', score)
  while low < high do -- entries of one score are in the order of their names
    local middle = math.floor((low + high) / 2)
    if call('ZRANGE', entries, middle, middle)[1] > entry then high = middle else low = middle + 1 end
  end
  return low
end
