"""job.sh in the folder of each run, which repeats it."""
