"""Resources kept by slots: workflows, one for each unit."""
