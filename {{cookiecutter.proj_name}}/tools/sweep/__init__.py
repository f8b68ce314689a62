"""Training once for each of many values, chosen by a grid or at random."""
