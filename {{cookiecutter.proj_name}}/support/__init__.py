"""What train.py, predict.py and the tools share: the command line, advice, summaries, reports, `job.sh`, sweeps, Slurm
jobs. It uses `common` and your package; neither depends on it to train."""

import common  # noqa: F401 - before PyTorch and others: it says what is missing
