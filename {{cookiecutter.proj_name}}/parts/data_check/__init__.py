"""Whether the data are the same: samples that are read before training, twice, and again by a resume."""
