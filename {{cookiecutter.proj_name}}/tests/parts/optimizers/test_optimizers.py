"""Several optimizers in one run: the numbers of each alone, and an exact resume."""

import pytest
import torch

from common.base import parts
from common.base.errors import UserError
from common.base.parts import refuse_absent
from common.config import ConfigError, resolve
from common.optim import OptimConfig, build_optimizer
from tests.conftest import Runs, load
from tests.optim.test_optim import loss_of, mlp, train
from tests.resume import same_after_cut


def test_an_optimizer_per_group_is_that_optimizer_alone() -> None:
    """Muon for matrices, AdamW with two kinds of betas for the biases: the numbers of three optimizers."""
    matrices = {"match": "*", "ndim": 2, "optim_type": "muon", "lr_mult": 20}
    groups = [matrices, {"match": "0.bias", "args": {"betas": [0.5, 0.9]}}]
    values = {"optim_type": "adamw", "weight_decay": 0.1, "args": {"eps": 1e-6}, "groups": groups}
    config = resolve(OptimConfig, [], stored=values).config
    mine, model = mlp(), mlp()
    first, second = model[0], model[2]
    alone: list[torch.optim.Optimizer] = [
        torch.optim.Muon([first.weight, second.weight], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([first.bias], lr=1e-3, weight_decay=0.1, betas=(0.5, 0.9), eps=1e-6),
        torch.optim.AdamW([second.bias], lr=1e-3, weight_decay=0.1, eps=1e-6),
    ]
    train(mine, build_optimizer(config, mine), 3)
    for _ in range(3):
        model.zero_grad()
        loss_of(model).backward()
        for optimizer in alone:
            optimizer.step()
    assert all(map(torch.equal, mine.parameters(), model.parameters()))


def test_wrong_groups() -> None:
    """A name for two groups of different optimizers; two learning rates."""
    one = {"match": "0.weight", "optim_type": "SGD", "name": "x"}
    config = resolve(OptimConfig, [], stored={"groups": [one, {"match": "0.bias", "name": "x"}]}).config
    with pytest.raises(UserError, match="two groups of parameters are called x"):
        build_optimizer(config, mlp())
    with pytest.raises(ConfigError, match="lr_mult a factor of optim"):
        resolve(OptimConfig, [], stored={"groups": [{**one, "lr": 0.1, "lr_mult": 3}]})


def test_the_core_refuses_to_resume_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"about": {"config": {"optim": {"groups": [{"match": "*", "ndim": 4}]}}}}
    refuse_absent(saved)
    monkeypatch.setattr(parts, "installed", lambda: [])
    with pytest.raises(UserError, match="needs parts/optimizers"):
        refuse_absent(saved)


MATRICES = "[{match: '*', ndim: 2, optim_type: Muon, args: {adjust_lr_fn: match_rms_adamw}}]"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_muon_with_adamw_resumes_exactly(runs: Runs, ranks: int) -> None:
    """The sample model, Muon for its matrix; each parameter has the state of its optimizer."""
    uncut, _ = same_after_cut(runs, "warm-up", "--optim.groups", MATRICES, ranks=ranks)
    state = load(uncut)["optimizer"]
    moments = [state["state"][number] for group in state["param_groups"] for number in group["params"]]
    assert sum(moment.keys() == {"momentum_buffer"} for moment in moments) == 1
    assert sum(moment.keys() == {"step", "exp_avg", "exp_avg_sq"} for moment in moments) == len(moments) - 1
