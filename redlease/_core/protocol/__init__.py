"""The wire format, without I/O: the Lua scripts, their arguments and replies, and the meaning of error replies."""
