"""Slurm jobs: preparing and requeueing them. No other package in `common` needs this one."""
