-- form: refuses what a newer release has stored in another form: it has minus the number of that form in the place of the expiry.
if expires < 0 then
  return redis.error_reply('NEWERFORM this resource is stored in form ' .. -expires .. ', which these scripts do not know')
end
