"""Progress reports of a run: log lines, numbers and curves."""
