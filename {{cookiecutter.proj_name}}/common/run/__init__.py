"""The folder of a run: its paths, its lock, its record."""
