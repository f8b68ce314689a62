"""What `tools.sweep` and `tools.search` share: the values to try, the folder of a sweep, its training processes."""
