"""Publishes the weights of each new best checkpoint on a Hugging Face hub: safetensors, config, and a model card."""

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi
from loguru import logger

from common.checkpoint.file import read_checkpoint
from common.checkpoint.weights import averaged_state_dict
from common.config import dump
from parts.after_save.calls import Saved
from tools.checkpoint import export

CARD = """---
license: {license}
library_name: pytorch
---
# {run}

Step {step}, validation:

{values}
"""


def publish(saved: Saved, repo: str, private: bool = True, license: str = "other") -> None:
    """Replace the weights in `repo`, `user/name`, which is made if there is none; earlier ones stay in its history.

    `hf auth login` or HF_TOKEN gives access; HF_ENDPOINT names another hub.
    """
    if saved.name != "best.pt":
        return
    state, hub = read_checkpoint(saved.path), HfApi()
    with TemporaryDirectory() as folder:
        export(averaged_state_dict(state["model"], state), Path(folder, "model.safetensors"))
        Path(folder, "config.yaml").write_text(dump(state["about"]["config"]))
        values = "\n".join(f"- {name}: {value:.6g}" for name, value in state["values"].items())
        card = CARD.format(license=license, run=saved.run.name, step=saved.step, values=values)
        Path(folder, "README.md").write_text(card)
        hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"step {saved.step} of {saved.run.name}")
    logger.info("published the weights of step {} as {}", saved.step, repo)
