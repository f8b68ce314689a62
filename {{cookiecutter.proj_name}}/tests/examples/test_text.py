"""Sentences of different lengths: every word counts equally, however they are batched."""

import io
import json
import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from common.base.errors import UserError
from common.task import Task
import predict
from examples.text.data import GOOD, Reviews, review
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


def test_lines_of_text(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example: a sample per line, of files, folders and the standard input; each row has its place and its text."""
    few = "reviews: 64}"
    folder = trained(runs, "text/config", "--dataset.train", f"{{type: examples.text.data.Reviews, {few}", name="text")
    lines = ["The music was lovely.", "", "the hotel was pizza", "I think the film was not very good, but..."]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    (tmp_path / "in" / "b.md").write_text("no text of ours")
    nested = "{type: Subset, first: 1, set: {type: examples.text.data.Reviews, reviews: 4}}"
    words = ["--model_pt", str(folder), "--skip_unreadable", "--worker", "1", "--dataset.eval", nested]
    assert predict.main([*words, "--input", str(tmp_path / "in")]) == 0
    rows = [json.loads(line) for line in (folder / "predict" / "predictions.jsonl").read_text().splitlines()]
    assert [(row["file"], row["text"]) for row in rows] == [(f"{tmp_path}/in/a.txt:{n}", lines[n - 1]) for n in (1, 4)]
    assert all(row["class"] in ("negative", "positive") and 0.5 <= row["probability"] <= 1 for row in rows)
    shown = capfd.readouterr()
    assert f"{tmp_path}/in/a.txt:3: unknown words: pizza" in shown.err and "text The music was lovely." in shown.out
    for data, said in (
        (b"the plot was good\n", None),
        (b"\xff\xfe", "--input: - is not text in UTF-8"),
        (b"\n", "no line that"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(UserError, match=said) if said else nullcontext():
            assert predict.main([*words, "--input", "-"]) == 0
    assert "-:1  text the plot was good  class" in capfd.readouterr().out
    word = trained(runs, "text/next_word", "--dataset.train", f"{{type: examples.text.data.Reviews, {few}", name="next")
    (tmp_path / "b.txt").write_text("the music was\n")
    assert predict.Predictor(word)([tmp_path / "b.txt"])[0].keys() == {"file", "text", "next"}
