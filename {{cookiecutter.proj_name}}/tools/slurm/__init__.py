"""Jobs on a Slurm cluster: preparing them (scripts/slurm.sh calls `python -m tools.slurm`) and queueing them again."""
