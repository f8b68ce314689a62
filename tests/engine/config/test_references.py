"""References between keys and environment variables: what a user writes, what a run gets, and what its record holds."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Resolved, dump, resolve
from common.failure.program import report_errors
import evaluate
import train
from tests.conftest import CONFIG, Runs, load
from custom.config import Config


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    (folder / name).write_text(f"$BASE: {CONFIG}\n{text}")
    return folder / name


def resolved(folder: Path, text: str, *words: str) -> Resolved[Config]:
    return resolve(Config, [write(folder, text)], words)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what train.py prints when it refuses a command line, on one line."""
    with pytest.raises(SystemExit) as ended, report_errors():
        train.main([*words])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return " ".join(text.split())


CASES: list[tuple[str, str, Any]] = [
    ("batch_size: ${model.width}\nmodel: {width: 8}", "batch_size", 8),
    ("model: {width: '${batch_size}'}", "model.width", 64),
    ("optim: {weight_decay: '${optim.lr}'}", "optim.weight_decay", 0.001),
    ("optim: {lr: 1}\nmodel: {dropout: '${optim.lr}'}", "model.dropout", 1),
    ("name: ${batch_size}", "name", "64"),
    ("name: 007\ninit_from: {prefix: '${name}'}", "init_from.prefix", "007"),
    ("name: x_${optim.lr}_${model.type}_${prepare.compile.enabled}", "name", "x_0.001_ConvModel_false"),
    ("dataset: {val: '${dataset.eval}'}", "dataset.val", {"type": "DigitsDataset", "eval_batch_size": 256}),
    ("optim: {no_decay: '${prepare.freeze}'}\nprepare:\n  freeze: a,b", "optim.no_decay", ["a", "b"]),
    ("gpu_ids: [3, 4]\nbatch_size: ${gpu_ids[1]}", "batch_size", 4),
    ("gpu_ids: [7, '${progress.epoch}']", "gpu_ids", [7, 40]),
    (
        "optim: {accumulate: '${batch_size}'}\nbatch_size: ${num_workers}\nnum_workers: ${model.width}",
        "optim.accumulate",
        32,
    ),
    ("loss: {torch.nn.L1Loss: {weight: 0.5}}\noptim: {lr: '${loss.torch.nn.L1Loss.weight}'}", "optim.lr", 0.5),
    ("name: $${batch_size}-$HOME", "name", "${batch_size}-$HOME"),
    ("resume: ${init_from.path}", "resume", None),
]


@pytest.mark.parametrize(("text", "key", "value"), CASES, ids=[text for text, _, _ in CASES])
def test_a_reference_stands_for_the_value_of_its_target(tmp_path: Path, text: str, key: str, value: Any) -> None:
    """With the target's type, a section or list too; inside text it becomes text; defaults can be referred to."""
    found: Any = resolved(tmp_path, text).values
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_references_are_resolved_after_everything_is_merged(tmp_path: Path) -> None:
    """A base's reference follows values of the file above it, of the command line, and of --debug."""
    write(tmp_path, "name: run_${optim.lr}_${model.width}\nbatch_size: ${model.width}\n", "base.yaml")
    top = tmp_path / "top.yaml"
    top.write_text("$BASE: base.yaml\nmodel: {width: 16}\n")
    assert resolve(Config, [top]).config.batch_size == 16
    found = resolve(Config, [top], ["--model.width", "8", "--optim.lr", "0.5"])
    assert (found.config.batch_size, found.config.name) == (8, "run_0.5_8")
    assert resolve(Config, [top], ["--batch_size", "3"]).config.batch_size == 3
    assert resolve(Config, [top], ["--num_workers=${model.width}"]).config.num_workers == 16
    overlay = tmp_path / "debug.yaml"
    overlay.write_text("model: {width: 4}\n")
    assert resolve(Config, [top, overlay]).config.batch_size == 4


def test_the_places_of_reference_and_target_are_printed(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--print-config shows the value, where the reference is, and where its value comes from."""
    file = write(tmp_path, "batch_size: ${num_workers}\nnum_workers: ${optim.accumulate}\noptim:\n  accumulate: 3\n")
    with pytest.raises(SystemExit):
        train.main(["--config", str(file), "--model.width", "${num_workers}", "--print-config"])
    shown = [line.split("  # ") for line in capsys.readouterr().out.splitlines() if "${" in line]
    last = f"${{optim.accumulate}}: {file}:5"
    assert [[part.strip() for part in line] for line in shown] == [
        ["batch_size: 3", f"{file}:2, ${{num_workers}}: {file}:3, {last}"],
        ["num_workers: 3", f"{file}:3, {last}"],
        ["width: 3", f"command line: --model.width ${{num_workers}}, ${{num_workers}}: {file}:3, {last}"],
    ]


WRONG: list[tuple[str, list[str]]] = [
    ("batch_size: ${modle.width}", ["1 problem", "mine.yaml:2", "no key modle.width", "did you mean model.width?"]),
    ("batch_size: ${zzzzzz}", ["no key zzzzzz"]),
    ("batch_size: ${gpu_ids[5]}\ngpu_ids: [1]", ["no key gpu_ids[5]"]),
    ("name: ${A_VARIABLE:-x}", ["${env:NAME:-default}", "$$ for a dollar"]),
    ("name: ${env:NOT_SET}", ["NOT_SET is not set", "${env:NOT_SET:-default}", "mine.yaml:2"]),
    ("name: x_${optim}", ["optim is a section or a list", "part of a string"]),
    (
        "batch_size: ${name}",
        ["batch_size = 'default' (", "mine.yaml:2, ${name}: ", "base.yaml:", "must be a valid integer"],
    ),
    ("batch_size: ${batch_size}", ["batch_size = '${batch_size}' (", "are circular; batch_size -> batch_size"]),
    (
        "num_workers: ${batch_size}\nbatch_size: ${optim.accumulate}\noptim: {accumulate: '${num_workers}'}\n"
        "name: ${num_workers}",
        ["1 problem", "mine.yaml:2", "are circular; num_workers -> batch_size -> optim.accumulate -> num_workers"],
    ),
    ("model: {width: '${model}'}", ["are circular; model.width -> model.width"]),
    (
        "name: ${init_from.path}_x\ninit_from: {path: '${nam}'}\nplugins: ['${name}']",
        ["1 problem", "init_from.path = '${nam}'", "did you mean name?"],
    ),
    (
        "batch_size: ${nope}\nnum_workers: -1\noptim: {lrr: 1}",
        ["3 problems", "no key nope", "num_workers = -1", "optim.lrr"],
    ),
    ("model: {width: '${nope}', dropout: 2x}", ["2 problems", "no key nope", "model.dropout = '2x'"]),
    ("$BASE: ${name}.yaml", ["$BASE", "there is no key name"]),
]


@pytest.mark.parametrize(("text", "pieces"), WRONG, ids=[text for text, _ in WRONG])
def test_a_reference_that_cannot_be_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, pieces: list[str]
) -> None:
    """One problem for one mistake, with its place; all others are reported with it."""
    monkeypatch.setenv("A_VARIABLE", "x")
    monkeypatch.delenv("NOT_SET", raising=False)
    file = write(tmp_path, text)
    if text.startswith("$BASE"):
        file.write_text(text)
    message = refused(capsys, "--config", str(file))
    assert all(piece in message for piece in pieces), message


def test_a_part_of_a_section_that_is_a_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would silently lose the other keys of the section."""
    file = write(tmp_path, "dataset:\n  val: ${dataset.eval}\n")
    message = refused(capsys, "--config", str(file), "--dataset.val.shift", "2")
    assert "changes a part of ${dataset.eval}" in message and f"{file}:3" in message
    whole = ["--dataset.val", "{$REPLACE: true, type: DigitsDataset}"]
    assert resolve(Config, [file], whole).config.dataset.val == {"type": "DigitsDataset"}


def test_a_run_with_references_can_be_rebuilt_and_changed(runs: Runs, tmp_path: Path) -> None:
    """config.yaml holds values only, so a change on resume does not reach what was written as a reference."""
    text = "name: lr_${optim.lr}\noptim: {lr: 1e-5, weight_decay: '${optim.lr}'}\nnum_workers: ${env:NO_WORKERS:-0}\n"
    words = ["--config", str(write(tmp_path, text)), "--dir.runs_dir", str(runs.root), "--debug.max_samples", "96"]
    words += ["--monitor.writers", "[]", "--model.width", "4", "--progress.epoch_val", "-1"]
    assert train.main([*words, "--progress.max_steps", "1"]) == 0
    folder = runs.root / "lr_1e-05"
    first = resolve(Config, [write(tmp_path, text)], [*words[2:], "--progress.max_steps", "1"])
    stored = resolve(Config, [folder / "config.yaml"])
    assert stored.values == first.values == load(folder)["about"]["config"]
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    assert (raw["optim"]["weight_decay"], raw["name"], raw["num_workers"]) == (1e-5, "lr_1e-05", 0)
    words = ["--optim.lr", "0.5", "--progress.max_steps", "2", "--allow_changes", "true"]
    assert train.main(["--resume", str(folder), *words]) == 0
    optim = load(folder)["about"]["config"]["optim"]
    assert (optim["lr"], optim["weight_decay"]) == (0.5, 1e-5)
    assert load(folder)["position"]["step"] == 2
    best = folder / "checkpoints" / "latest.pt"
    assert evaluate.main(["--model_pt", str(best), "--split", "val"]) == 0


def test_environment_variables_are_recorded_with_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record must not depend on the environment; dollars in a variable are not read as references."""
    monkeypatch.setenv("WHERE", "/data/$x/${batch_size}")
    monkeypatch.setenv("RATE", "1e-2")
    text = "name: ${env:WHO:-me}_${batch_size}\noptim: {lr: 1}\ninit_from: {path: '${env:WHERE}/${name}'}\n"
    found = resolved(tmp_path, text, "--optim.lr", "${env:RATE}")
    assert found.values["init_from"]["path"] == "/data/$x/${batch_size}/me_64"
    assert found.values["optim"]["lr"] == 0.01
    monkeypatch.delenv("WHERE")
    monkeypatch.delenv("RATE")
    (tmp_path / "config.yaml").write_text(dump(found.values))
    assert resolve(Config, [tmp_path / "config.yaml"]).values == found.values
