"""Complete examples of tasks, one folder each, to copy and change. See README.md in this folder."""
