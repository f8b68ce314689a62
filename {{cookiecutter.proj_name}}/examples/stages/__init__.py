"""Training in two stages: the head alone, then everything; and augmentation that grows with the epochs."""
