"""Training data that can only be read in order: docs/parts/streams.md."""
