"""`init_weights`: first weights by the names of parameters."""

import torch

from tests.conftest import ErrorOf, Runs, load
from tests.ranks import several

PLAIN = ["--model", "{type: tests.parts.Plain}", "--progress.max_steps", "1"]


def test_weights_begin_as_the_config_says(runs: Runs, error_of: ErrorOf) -> None:
    """By pattern, the later rule on top; the same on all ranks, and before init_from; a rate of almost 0 keeps them."""
    second = "match: [layers.1.bias, '*.3.bias'], type: constant, val: 7"
    rules = f"[{{match: '*.weight', type: trunc_normal, std: 0.01}}, {{{second}}}]"
    words = [*PLAIN, "--init_weights", rules, "--optim.lr", "1e-12", "--batch_size", "16"]
    folder = runs.train(*words)
    model = load(folder)["model"]
    assert model["layers.1.bias"].eq(7).all() and model["layers.3.bias"].eq(7).all()
    assert 0.008 < float(model["layers.1.weight"].std()) < 0.012
    several(runs, 2, runs.words(*words, name="two"))
    assert torch.allclose(load(runs.root / "two")["model"]["layers.1.weight"], model["layers.1.weight"], atol=1e-9)
    other = runs.train(*PLAIN, "--dist.random_seed", "1", "--optim.lr", "1e-12", name="other")
    start = ["--init_from", f"{{path: {other}/checkpoints/latest.pt}}"]
    both = load(runs.train(*words, *start, name="both"))["model"]
    assert torch.allclose(both["layers.1.bias"], load(other)["model"]["layers.1.bias"], atol=1e-9)
    for rule, said in (
        ("match: '*.weight', type: kaiming_norml", "did you mean kaiming_normal?"),
        ("match: '*.weight', type: normal, sdt: 1", "init_weights[0].sdt = 1"),
        ("type: zeros", "init_weights[0].match"),
        ("match: '*.wieght', type: zeros", "init_weights[0].match: *.wieght matches none"),
        ("match: '*.bias', type: kaiming_normal", "init_weights[0]: kaiming_normal does not fit layers.1.bias (16,)"),
    ):
        assert said in error_of(*PLAIN, "--init_weights", f"[{{{rule}}}]")
