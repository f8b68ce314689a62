"""Your code: config, task, datasets, models, losses and metrics.

Files below this folder are found by their names: `*_task.py`, `*_model.py`, `*_dataset.py`, `*_loss.py`, `*_metric.py`,
and the other kinds of `python train.py --list`. What they register can be named in a config.
"""

from common.config.registry import scan

scan("library", __name__)
