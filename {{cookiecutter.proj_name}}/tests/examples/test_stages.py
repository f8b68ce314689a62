"""Two stages: what stands still, what moves, and augmentation that knows the epoch."""

from typing import Any

import pytest

from tests.conftest import Runs, load, same
from tests.examples.runs import distance, trained

EXAMPLE = "stages/config"
SMALL = [
    "--debug.max_samples", "128", "--model.width", "8", "--optim.lr_scheduler", "{type: constant, warmup: 0}",
    "--progress.epoch_eval", "-1", "--stages", "[{until: 2, freeze: [backbone.*]}, {}]",
    "--dataset.train.until_epoch", "3",
]  # fmt: skip


def test_the_backbone_stands_still_in_the_first_stage(runs: Runs) -> None:
    """Neither weights nor decay nor moments; then it moves at its own rate."""
    more = ["--progress.epoch_save_checkpoint", "1", "--checkpoint.keep", "0", "--optim.weight_decay", "0.1"]
    folder = trained(runs, EXAMPLE, *SMALL, *more, "--progress.epoch", "3")
    first, second, third = (load(folder, f"step_{step:08}") for step in (2, 4, 6))
    backbone = [name for name in first["model"] if name.startswith("backbone")]
    assert backbone and all(same(first["model"][name], second["model"][name]) for name in backbone)
    assert not any(same(second["model"][name], third["model"][name]) for name in backbone)
    assert not same(first["model"]["head.weight"], second["model"]["head.weight"])

    def moments(state: dict[str, Any]) -> set[str]:
        names: dict[int, str] = {}
        for group in state["optimizer"]["param_groups"]:
            names |= dict(zip(group["params"], group["param_names"], strict=True))
        return {names[number] for number in state["optimizer"]["state"]}

    assert moments(second) == {"head.weight", "head.bias"}
    assert moments(third) == set(first["model"])
    rates = {group["name"]: group["lr"] for group in third["optimizer"]["param_groups"]}
    assert rates["backbone"] == pytest.approx(0.3 * 0.01) and 0.01 in rates.values()


@pytest.mark.slow
def test_workers_know_the_epoch(runs: Runs) -> None:
    """The same augmentation with and without workers, also if they live on; another one without `set_epoch`."""
    common = [*SMALL, "--progress.epoch", "4"]
    none = trained(runs, EXAMPLE, *common, name="none")
    workers = trained(runs, EXAMPLE, *common, "--num_workers", "2", name="workers")
    assert distance(none, workers) == 0.0
    common[common.index("--dataset.train.until_epoch") + 1] = "1"
    assert distance(none, trained(runs, EXAMPLE, *common, name="stronger")) > 1e-4
