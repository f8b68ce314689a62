"""Predict for files: python predict.py --model_pt experiments/default --input FILES|FOLDER [--gpu_ids 0 ...]"""

import common  # noqa: F401  # isort: skip - first, since it says what is missing

import sys

from common.failure.program import exit_process, report_errors
from cli.advice import explain_errors
from tools.predict import Predictor, main

__all__ = ["Predictor", "main"]

if __name__ == "__main__":
    with report_errors(), explain_errors():
        exit_process(main(sys.argv[1:]))
