"""Jobs of Slurm: preparing one, and queueing it again. No other room needs this one."""
