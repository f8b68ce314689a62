"""Training data that can only be read in order: a stream."""
