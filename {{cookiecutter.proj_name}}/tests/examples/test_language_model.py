"""The language model: what its loss is over, what decays, and what its log shows."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.base.errors import UserError
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from examples.language_model.data import CHARACTERS, Text, decode, encode
from examples.language_model.model import GPT
from examples.language_model.task import LanguageModelTask
from tests.conftest import Runs, load, metrics, same
from tests.examples.runs import shown, trained

EXAMPLE = "language_model/config"
TINY = [
    "--model", "{width: 16, heads: 2, context: 16}", "--task.length", "40", "--progress.log_every", "4",
    "--progress.epoch_val", "4step", "--optim.lr_scheduler", "{type: constant}",
]  # fmt: skip


def tiny(context: int = 16, length: int = 4000, eval_batch_size: int = 64) -> list[str]:
    """Everything small: a text of some steps."""
    data = f"type: examples.language_model.data.Text, context: {context}, length: {length}"
    val = f"{{{data}, eval_batch_size: {eval_batch_size}}}"
    return [*TINY, "--dataset.train", f"{{{data}}}", "--dataset.val", val]


def test_a_character_sees_those_before_it() -> None:
    """And none that it has to predict."""
    model, text = GPT(10, context=8, heads=2, width=16).eval(), torch.arange(8)[None]
    other = torch.where(torch.arange(8) < 5, text, 9 - text)
    same_so_far = [torch.allclose(*pair) for pair in zip(model(text)[0], model(other)[0], strict=True)]
    assert same_so_far == [True] * 5 + [False] * 3


def test_validation_is_over_the_whole_text(runs: Runs) -> None:
    """The loss is the mean over all characters but the first, each predicted once, whatever the batches are."""
    fp64 = ["--precision.mode", "fp64", "--progress.max_steps", "4"]
    folders = [trained(runs, EXAMPLE, *tiny(eval_batch_size=size), *fp64, name=f"by{size}") for size in (64, 7)]
    losses = [metrics(folder, "val")[-1]["values"]["loss"] for folder in folders]
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)

    model = GPT(len(CHARACTERS), context=16, heads=2, width=16).double()
    model.load_state_dict(load(folders[0])["model"])
    text = Text(Path(), "val", context=16, length=4000).text
    assert len(text) == 400
    with torch.no_grad():
        found = [model(text[None, start : start + 16][:, : 399 - start])[0] for start in range(0, 399, 16)]
    assert losses[0] == pytest.approx(float(cross_entropy(torch.cat(found), text[1:])), rel=1e-13)


def test_samples_change_nothing(runs: Runs) -> None:
    """The text is a function of the step; training is the same, however often one is written."""
    often = trained(runs, EXAMPLE, *tiny(), "--progress.max_steps", "8", "--model.dropout", "0.2", name="often")
    rarely = [*tiny(), "--progress.max_steps", "8", "--model.dropout", "0.2"]
    rarely[rarely.index("--progress.log_every") + 1] = "8"
    once = trained(runs, EXAMPLE, *rarely, name="once")
    assert [len(each) for each in (shown(often, "sample"), shown(once, "sample"))] == [2, 1]
    assert shown(often, "sample")[-1] == shown(once, "sample")[-1]
    assert same(load(often)["model"], load(once)["model"])


def test_only_matrices_decay(runs: Runs) -> None:
    """nanoGPT's rule, from `optim.no_decay: auto`; the head and the characters are one matrix, and decay once."""
    optimizer = load(trained(runs, EXAMPLE, *tiny(), "--progress.max_steps", "1"))["optimizer"]
    decay = {name: group["weight_decay"] for group in optimizer["param_groups"] for name in group["param_names"]}
    assert {decay[name] for name in decay if name.endswith("norm.weight")} == {0.0}
    assert decay["blocks.0.hidden.weight"] == decay["characters.weight"] == 0.1
    assert "head.weight" not in decay


def test_a_text_of_ones_own(runs: Runs) -> None:
    """Characters that it does not know are left out."""
    (runs.root / "my.txt").write_text("Grüße,\nyou 2!" * 100, encoding="utf-8")
    text = Text(runs.root, "train", context=8, file="my.txt").text
    assert decode(text[:12].tolist()) == "Gre,\nyou 2!G"
    assert decode(encode(CHARACTERS).tolist()) == CHARACTERS
    with pytest.raises(UserError, match=r"dataset\.val: 1100 characters are too few for blocks of 200"):
        Text(runs.root, "val", context=200, file="my.txt")
    with pytest.raises(UserError, match=r"dataset\.val\.file: there is no .*your\.txt"):
        Text(runs.root, "val", context=8, file="your.txt")


def test_mistakes() -> None:
    """Blocks longer than the context, and a prompt without a character."""
    model = GPT(len(CHARACTERS), context=8, width=16)
    with pytest.raises(UserError, match=r"the dataset's blocks have 16 characters, but model\.context is 8"):
        model(torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(UserError, match=r"task\.prompt: 'äö' has no character that the model knows"):
        LanguageModelTask(model, LossFactory(None), MetricFactory({}), prompt="äö")
