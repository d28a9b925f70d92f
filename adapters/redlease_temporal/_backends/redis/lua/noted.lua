-- noted: put before the scripts that write records. A record's text, with the note of a release that another text has.
-- A note of another request, and of another permit, is left out.
local function noted(text, other)
  local note = string.match(other, '"release":(%b{})')
  local first, last = string.find(text, '"release":null', 1, true)
  if not first then first, last = string.find(text, '"release":%b{}') end
  if not note or not first then return text end
  local about, from = cjson.decode(text), cjson.decode(other)
  local fence = from.release.fence
  if from.request ~= about.request and (fence == 0 or fence ~= about.fence) then return text end
  return string.sub(text, 1, first - 1) .. '"release":' .. note .. string.sub(text, last + 1)
end

