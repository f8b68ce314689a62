"""The table of runs, and the report of one or several."""
