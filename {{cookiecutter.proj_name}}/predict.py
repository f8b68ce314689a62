"""Predict for files: python predict.py --model_pt experiments/default --input FILES|FOLDER [--gpu_ids 0 ...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P and PYTHONSAFEPATH leave it out

import common  # noqa: F401  # isort: skip - first, since it says what is missing
from cli.program import run
from tools.predict import Predictor, main

__all__ = ["Predictor", "main"]

if __name__ == "__main__":
    run(main)
