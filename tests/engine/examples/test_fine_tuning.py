"""The examples with transformers, datasets and peft, the real packages; nothing is downloaded."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # a package that asks the hub fails

from common.base.errors import UserError
import train
from cli.trained import load_trained
from tests.conftest import Runs, load, metrics
from tests.examples.runs import distance, trained, words
from tests.examples.test_examples import OFTEN, STOPPED, differing, merged

# What needs the packages is imported by the tests: four seconds, in each process that collects them.
pytestmark = pytest.mark.slow
TINY = ("--dataset.train.reviews", "160", "--dataset.val.reviews", "32", "--optim.lr_scheduler.warmup", "2step")
LORA = (*TINY, "--model.settings.lora_dropout", "0.3")
WAYS = {
    "index": ("hugging_face/config", (*TINY, "--model.settings.resid_pdrop", "0.3")),
    "stream": ("hugging_face/stream", (*TINY, "--dataset.train.buffer", "0")),
    "buffer": ("hugging_face/stream", (*TINY, "--dataset.train.buffer", "50")),
    "lora": ("lora/config", LORA),
}


@pytest.fixture
def base(runs: Runs) -> Callable[..., tuple[str, str]]:
    """Train the model that adapters are added to; the words that name it."""

    def train_base(*more: str) -> tuple[str, str]:
        folder = trained(runs, "hugging_face/config", *more, name="base")
        return "--init_from.path", str(folder / "checkpoints" / "best.pt")

    return train_base


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


@pytest.mark.parametrize("way", WAYS)
def test_it_is_resumed_to_the_bit(runs: Runs, base: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped within an epoch and a shard, twice, and resumed: weights, rows, everything."""
    example, more = WAYS[way]
    line = merged(*OFTEN, *more, *(base(*TINY, "--progress.epoch", "1") if way == "lora" else ()))
    whole = trained(runs, example, *line, name="whole")
    for step in (STOPPED, 8):
        monkeypatch.setenv("SIGNAL_AFTER", f"{step} {signal.SIGTERM.value}")
        stopped = words(runs, example, *line, "--resume", "auto", name="cut")
        assert train.main(stopped) == 128 + signal.SIGTERM
    monkeypatch.delenv("SIGNAL_AFTER")
    resumed = trained(runs, example, *line, "--resume", "auto", name="cut")
    assert differing(whole, resumed) == []
    assert ("the dataset cannot restore its position: reading" in log(resumed)) == (way == "buffer")


def test_two_processes_train_what_one_does(runs: Runs) -> None:
    """With half the batch each, in fp64, where texts of different lengths meet."""
    example, more = WAYS["stream"]
    line = [*OFTEN, *more, "--precision.mode", "fp64"]
    one = trained(runs, example, *merged(*line), name="one")
    two = trained(runs, example, *merged(*line, "--batch_size", "16"), name="two", processes=2)
    assert distance(one, two) <= 1e-12


def test_adapters_are_trained_saved_and_merged(runs: Runs, base: Any, evaluated: Any, tmp_path: Path) -> None:
    """The base is learnt and then left as it is; files hold the adapters alone; the merged model does the same."""
    from examples.hugging_face.data import Texts
    from examples.hugging_face.model import causal_model
    from examples.lora import merge

    weights = base()
    assert metrics(runs.root / "base", "val")[-1]["values"]["loss"] < 1.5
    still = ("--progress.epoch", "1", "--optim.lr", "1e-12", *TINY[-2:])
    before = trained(runs, "lora/config", *weights, *still, name="before")
    folder = trained(runs, "lora/config", *weights, name="lora")
    first, last = (metrics(run, "val")[-1]["values"]["loss"] for run in (before, folder))
    assert first > 1.57 and last < 1.50
    state = load(folder, "best")
    assert state["model"] and all(".lora_" in name for name in state["model"])
    file, whole = folder / "checkpoints" / "best.pt", runs.root / "base" / "checkpoints" / "best.pt"
    assert file.stat().st_size < 0.1 * whole.stat().st_size
    assert evaluated(file, "--split", "val")["values"]["loss"] == pytest.approx(last, abs=1e-5)
    assert merge.main(["--model_pt", str(folder), "--out", str(tmp_path / "merged")]) == 0
    texts = Texts(tmp_path, "val", 64, praise=True)
    batch = texts.collate([texts[number] for number in range(64)])
    plain = causal_model("", {}, folder=str(tmp_path / "merged")).eval()
    adapted = load_trained(folder).task.output(batch)
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch).logits, adapted, rtol=1e-4, atol=1e-4)
        unlike = load_trained(runs.root / "base").task.output(batch)
    assert (unlike - adapted).abs().max() > 0.5
    assert not any("lora" in name for name in plain.state_dict())


def test_a_model_without_adapters_is_not_merged(runs: Runs, base: Any, tmp_path: Path) -> None:
    """With its name."""
    from examples.lora import merge

    _, weights = base(*TINY, "--progress.epoch", "1")
    with pytest.raises(UserError, match="its model is a GPT2LMHeadModel, which has no adapters of peft"):
        merge.main(["--model_pt", weights, "--out", str(tmp_path / "merged")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of JSON lines."""
    for number in range(3):
        rows = [json.dumps({"text": f"the film was good {number}{at}", "stars": at}) for at in range(4)]
        (tmp_path / f"part{number}.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_files_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By index and as a stream, which has a position."""
    from examples.hugging_face.data import Texts, TextStream

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    texts = Texts(folder, "train", files="part*.jsonl")
    kept = [texts[number]["text"] for number in range(len(texts))]
    assert kept == [f"the film was good {number}{at}" for number in range(3) for at in range(4)]
    stream = TextStream(folder, "train", files="part*.jsonl")
    records = iter(stream)
    before = [next(records)["text"] for _ in range(6)]
    other = TextStream(folder, "train", files="part*.jsonl")
    other.load_state_dict(stream.state_dict())
    assert before + [record["text"] for record in other] == kept
    with pytest.raises(UserError, match=r"dataset.train.files: .*/none\*.jsonl matches no file"):
        Texts(folder, "train", files="none*.jsonl")


def test_each_epoch_has_all_texts_in_another_order() -> None:
    """With a buffer, and by shards without one."""
    from examples.hugging_face.data import TextStream

    for buffer in (0, 20):
        stream = TextStream(Path(), "train", reviews=100, buffer=buffer)
        epochs = []
        for epoch in (0, 1, 2):
            stream.set_epoch(epoch)
            epochs.append([record["text"] for record in stream])
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
        assert epochs[1] != epochs[2] and hasattr(stream, "state_dict") == (not buffer)
