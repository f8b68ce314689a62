"""Training once for each of many values, of a grid, or some of them at random."""
