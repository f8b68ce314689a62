"""Your code: config, task, and one folder each for data sets, models, losses and metrics."""
