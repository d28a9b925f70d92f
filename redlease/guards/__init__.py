"""Guards: the resource's side of fencing, which refuses the late write of a former holder."""
