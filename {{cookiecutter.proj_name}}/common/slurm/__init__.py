"""Jobs of Slurm: preparing one, and queueing it again. Nothing else needs this room."""
