"""Slurm jobs: preparing and requeueing them. scripts/slurm.sh and custom/submit.py need it, and nothing else does."""
