"""Sentences of different lengths: every word counts equally, however they are batched."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from common.base.errors import UserError
from common.task import Task
from cli.trained import load_trained
from examples.text.data import GOOD, WORDS, Reviews, review
from examples.text.task import NextWordTask
from tests.conftest import Runs, metrics
from tests.examples.runs import distance, trained

EXAMPLE = "text/next_word"
FP64 = ["--precision.mode", "fp64", "--optim.lr_scheduler", "{type: constant}", "--progress.epoch", "1"]


class MeanOfMeans(NextWordTask):
    """The mistake: the mean loss over words is taken for one over sentences."""

    count = Task.count  # type: ignore[assignment]


def data(eval_batch_size: int = 128) -> list[str]:
    """100 sentences: three steps of 32, and one of 4."""
    kind = "type: examples.text.data.Reviews, reviews: 100"
    val = f"{{{kind}, eval_batch_size: {eval_batch_size}}}"
    return ["--dataset.train", f"{{{kind}}}", "--dataset.val", val, "--dataset.eval", "null"]


def three_ways(runs: Runs, *more: str) -> list[float]:
    """Largest differences of the weights: accumulated and on two processes, against 32 sentences at once."""
    common = [*FP64, *data(), *more]
    one = trained(runs, EXAMPLE, *common, name="one")
    two = trained(runs, EXAMPLE, *common, "--batch_size", "16", "--optim.accumulate", "2", name="accumulated")
    both = trained(runs, EXAMPLE, *common, "--batch_size", "16", name="both", processes=2)
    return [distance(one, two), distance(one, both)]


@pytest.mark.slow
def test_words_count_equally(runs: Runs) -> None:
    """32 x 1 = 16 x 2 accumulated = 2 processes x 16, in fp64."""
    assert max(three_ways(runs)) < 1e-12


@pytest.mark.slow
def test_without_count_they_would_not(runs: Runs) -> None:
    """The test above can fail."""
    assert min(three_ways(runs, "--task.type", "tests.examples.test_text.MeanOfMeans")) > 1e-6


def test_the_validation_loss_does_not_depend_on_the_batches(runs: Runs) -> None:
    """A batch's padding, and its number of words, change nothing."""
    losses = []
    for size in (1, 7, 128):
        folder = trained(runs, EXAMPLE, *FP64, *data(size), "--optim.lr", "1e-9", name=f"by{size}")
        losses.append(metrics(folder, "val")[-1]["values"]["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_the_batches() -> None:
    """Padding is masked, and every review is what its label says."""
    reviews = Reviews(None, "train", 64)
    batch = Reviews.collate([reviews[index] for index in range(64)])
    lengths = [len(reviews[index]["words"]) for index in range(64)]
    assert not isinstance(batch, dict) and batch["mask"].sum(dim=1).tolist() == lengths
    assert torch.equal(batch["words"][5][batch["mask"][5]], reviews[5]["words"])
    labels: Counter[int] = Counter()
    for seed in range(200):
        words, label = review(random.Random(seed))
        last = words[max(at for at, word in enumerate(words) if word in ("and", "but", "<start>")) :]
        labels[label] += 1
        assert label == ((last[-1] in GOOD) != ("not" in last))
    assert min(labels.values()) > 70


@pytest.mark.slow
def test_the_next_word_is_learnt(runs: Runs) -> None:
    """As far as it can be known: a uniform guess has 3.69 nats."""
    assert metrics(trained(runs, EXAMPLE), "val")[-1]["values"]["loss"] < 1.5


@pytest.mark.parametrize("example", ["text/config", "text/next_word"])
def test_what_a_person_wrote(runs: Runs, example: str) -> None:
    """As predict.py asks for it: a line of text is prepared like a review, and the task describes its output."""
    folder = trained(runs, example, "--dataset.train", "{type: examples.text.data.Reviews, reviews: 64}")
    task: Any = load_trained(folder).task
    sample = Reviews.from_files(["I think the film was not very good, but..."])[0]
    assert " ".join(WORDS[number] for number in sample["words"]) == "<start> i think the film was not very good but"
    batch = Reviews.collate([sample])
    with torch.no_grad():
        (row,) = task.describe(task.post_process(task.output(batch), batch), batch)
    assert row.keys() == ({"next"} if "next" in example else {"class", "probability"})
    with pytest.raises(UserError, match="unknown words: pizza"):
        Reviews.from_files(["the hotel was pizza"])[0]
