"""Functions for checkpoint.after_save: checkpoints in a bucket, weights on a hub."""
