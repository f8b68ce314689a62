"""Write the model with its adapters merged into its weights, as a folder for `from_pretrained`:

python -m examples.lora.merge --model_pt experiments/lora --out FOLDER
"""

import argparse
import sys
from pathlib import Path

from peft import PeftModel

from common.base.errors import UserError
from common.failure.program import report_errors
from cli.trained import load_trained


def main(argv: list[str]) -> int:
    """Load the best checkpoint of a run, merge, save."""
    parser = argparse.ArgumentParser(prog="python -m examples.lora.merge", description=__doc__)
    parser.add_argument("--model_pt", required=True, help="a checkpoint, or a run: its best one")
    parser.add_argument("--out", type=Path, required=True, help="folder for the config and the weights")
    options = parser.parse_args(argv)
    model = load_trained(options.model_pt, ["--gpu_ids", "-1"]).task.model
    if not isinstance(model, PeftModel):
        raise UserError(f"{options.model_pt}: its model is a {type(model).__name__}, which has no adapters of peft")
    model.merge_and_unload().save_pretrained(options.out)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
