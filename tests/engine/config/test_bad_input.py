"""Mistakes that users make: each ends with one clear screen of text, no traceback, and an exit code that is not 0."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.base.errors import UserError
from common.config import resolve
from common.config.registry import MODEL_REGISTRY, file_of
import evaluate
import train
from tests.conftest import CONFIG, ENVIRONMENT, PROJECT, ErrorOf, Runs, load, run
from tests.data.test_images import images
from custom.config import Config
from custom.datasets.digits_dataset import DigitsDataset


def on_images(folder: Path, **more: str) -> list[str]:
    """Return the config changes that put a run on one's own images."""
    extra = "".join(f", {key}: {value}" for key, value in more.items())
    part = f"{{type: ImageFolderDataset, folder: {folder}, size: [8, 8]{extra}"
    return [
        "--dataset",
        f"{{train: {part}}}, val: {part}}}, eval: null}}",
        "--model.in_channels",
        "3",
        "--model.classes",
        "2",
    ]


@pytest.mark.parametrize(
    ("key", "near"),
    [("optim.lrr", "optim.lr"), ("modle", "model"), ("batch", "batch_size"), ("gpu", "gpu_ids")],
)
def test_misspelt_key(error_of: ErrorOf, key: str, near: str) -> None:
    """The key, where it was written, and the nearest right one: in the same section before all others."""
    text = error_of(f"--{key}", "0.1")
    assert f"(command line: --{key} 0.1)" in text and f"did you mean {near}?" in text


def test_a_key_of_another_section_in_a_list(error_of: ErrorOf) -> None:
    """A key of optim, in one of its groups, is not said to belong to the top level."""
    text = error_of("--optim.groups", "[{match: features.*, clip_type: norm}]")
    assert "optim.groups[0].clip_type" in text and "did you mean" in text and "top level" not in text


def test_every_mistake_at_once_with_file_and_line(error_of: ErrorOf, tmp_path: Path) -> None:
    """A wrong type, a bad value and an unknown key in one message, before anything is built."""
    config = tmp_path / "mine.yaml"
    config.write_text(f"$BASE: {CONFIG}\nnum_workers: many\noptim:\n  lr: -1\n  clip_tipe: norm\n")
    text = error_of("--config", str(config))
    assert "3 problems" in text
    for part in ("mine.yaml:2", "mine.yaml:4", "mine.yaml:5", "many", "did you mean optim.clip_type?"):
        assert part in text
    assert not (tmp_path / "run").exists()


MANY = """\
batch_size: 0
optim:
  optim_type: SGD
  args: {momentm: 0.9, dampning: 1}
  clip_gradients: -1
  lr_scheduler:
    type: cosin
    tmax: 0
best: {metric: Acuracy}
model: {type: ConvModle}
"""


@pytest.mark.slow
def test_no_mistake_hides_another(tmp_path: Path) -> None:
    """Rules of a section and of those around it, wrong types, a file that does not import: one message."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("experiments", "tests", "__pycache__", ".*cache*"))
    folder = project / Path(file_of(MODEL_REGISTRY.get("ConvModel")).split(":")[0]).parent
    (folder / "broken_model.py").write_text("x = 1\ndef f(:\n")
    (folder / "half_model.py").write_text("import no_such_thing\n")
    (project / "mine.yaml").write_text(f"$BASE: {CONFIG}\n{MANY}")
    done = run([sys.executable, "train.py", "--config", "mine.yaml"], cwd=project)
    text = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in text
    for part in (
        "9 problems",
        "batch_size = 0 (mine.yaml:2) must be",
        "optim.args.momentm = 0.9 (mine.yaml:5)", "did you mean momentum?",
        "optim.args.dampning = 1 (mine.yaml:5)", "did you mean dampening?",
        "optim.clip_gradients = -1 (mine.yaml:6)",
        "optim.lr_scheduler.type = 'cosin' (mine.yaml:8)", "did you mean cosine?",
        "optim.lr_scheduler.tmax = 0 (mine.yaml:9)",
        "best.metric = 'Acuracy' (mine.yaml:10)", "did you mean Accuracy?",
        "model.type = 'ConvModle' (mine.yaml:11)", "did you mean ConvModel?",
        "models/broken_model.py:2) cannot be imported: SyntaxError",
        "models/half_model.py:1 needs no_such_thing, which is not installed, so the file is skipped",
    ):  # fmt: skip
        assert part in text, (part, done.stderr)


@pytest.mark.parametrize(
    "words",
    [
        ["--optim.optim_type", "SDG", "--optim.args", "{momentum: 0.9}"],
        ["--optim.optim_type", "SDG", "--optim.args", "{momentum: 0.9}", "--optim.weight_decay", "0.1"],
        ["--optim.optim_type", "SGD", "--optim.args", "{momentm: 0.9, nesterov: true}"],
        ["--optim.lr_scheduler", "{type: torch.optim.lr_scheduler.StepLr, args: {step_size: 3}}"],
        ["--early_stop.patience", "x", "--dataset.val", "null"],
    ],
)
def test_a_mistake_is_not_reported_for_what_follows_from_it(error_of: ErrorOf, words: list[str]) -> None:
    """What is right beside a wrong key is not judged by that key's default."""
    assert "has 1 problem:" in error_of(*words)


@pytest.mark.parametrize(
    ("optim", "says"),
    [
        ("  args:\n    betas: [1.5, 0.9]", "optim.args ({}:3) optim_type AdamW refuses these: Invalid beta parameter"),
        ("  optim_type: SGD\n  args: {nesterov: true}", "optim.args ({}:4) optim_type SGD refuses these: Nesterov"),
        (
            "  groups: [{match: head.*, optim_type: RMSprop, args: {eps: -1}}]",
            "optim.groups[0].args ({}:3) optim_type RMSprop refuses these: Invalid epsilon value: -1",
        ),
        (
            "  groups: [{match: head.*, optim_type: LBFGS}]",
            "optim.groups[0].optim_type = 'LBFGS' ({}:3) needs a closure, and so all parameters",
        ),
    ],
)
def test_a_value_that_the_optimizer_refuses(error_of: ErrorOf, tmp_path: Path, optim: str, says: str) -> None:
    """Named with its place before anything is built, as an unknown argument is."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"$BASE: {CONFIG}\noptim:\n{optim}\n")
    assert f"1 problem: {says.format(file)}" in error_of("--config", str(file))


@pytest.mark.parametrize("key", ["progress.epoch_val", "optim.lr_scheduler.warmup"])
def test_a_period_that_is_none(error_of: ErrorOf, key: str) -> None:
    text = error_of(f"--{key}", "1/0epoch")
    assert f"1 problem: {key} = '1/0epoch' (command line" in text and '"0.5epoch"' in text


def test_missing_file(error_of: ErrorOf) -> None:
    """A missing config is an error with the path that was looked for."""
    text = error_of("--config", "configs/defualt.yaml")
    assert f"{PROJECT / 'configs' / 'defualt.yaml'} is not a file" in text


def test_missing_base_and_loop(error_of: ErrorOf, tmp_path: Path) -> None:
    """Who asked for the missing file; the chain of a loop."""
    for name, base in {"a": "b.yaml", "b": "a.yaml", "c": "nowhere.yaml"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"$BASE: {base}\n")
    text = error_of("--config", str(tmp_path / "c.yaml"))
    assert "c.yaml:1" in text and "nowhere.yaml" in text
    text = error_of("--config", str(tmp_path / "a.yaml"))
    assert "a.yaml -> " in text and "b.yaml -> " in text


def test_unknown_registry_name(error_of: ErrorOf) -> None:
    """The nearest name, and where to add."""
    text = error_of("--model.type", "ConvModle")
    assert "ConvModle" in text and "did you mean ConvModel?" in text
    assert "custom/.../<name>_model.py" in text and "@MODEL_REGISTRY.register()" in text


def test_wrong_argument_of_a_registered_class(error_of: ErrorOf) -> None:
    """Arguments are checked against the signature before anything is built."""
    text = error_of("--model.widht", "8", "--loss.CrossEntropyLoss.label_smoothing", "much")
    assert "2 problems" in text
    assert "model.widht" in text and "width" in text
    assert "loss.CrossEntropyLoss.label_smoothing" in text and "number" in text


@pytest.mark.slow
def test_two_classes_of_one_name(tmp_path: Path) -> None:
    """Both places are named."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("experiments", "tests", "__pycache__", ".*cache*"))
    first = project / Path(file_of(MODEL_REGISTRY.get("ConvModel")).split(":")[0])
    shutil.copy(first, first.with_name("second_model.py"))
    done = run([sys.executable, "train.py", "--config", "configs/default.yaml"], cwd=project)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "conv_model.py:" in done.stderr and "second_model.py:" in done.stderr and "ConvModel" in done.stderr


def test_missing_data_folder(error_of: ErrorOf, tmp_path: Path) -> None:
    assert "there is no" in error_of("--dir.data_dir", str(tmp_path)) and "dir.data_dir" in error_of(
        "--dir.data_dir", str(tmp_path)
    )
    assert f"no folder {tmp_path / 'none'}" in error_of(*on_images(tmp_path / "none"))


def test_empty_data(error_of: ErrorOf, tmp_path: Path) -> None:
    """B42: no samples at all, and a folder whose classes hold no images."""
    assert "dataset.train: Empty has no samples" in error_of("--dataset.train", "{type: tests.small.Empty}")
    assert "there are no images" in error_of(*on_images(images(tmp_path / "i", {"cat": 0, "dog": 0})))


def test_one_class(error_of: ErrorOf, tmp_path: Path) -> None:
    text = error_of(*on_images(images(tmp_path / "i", {"cat": 3})))
    assert "one sub-folder per class, at least two; found: cat" in text


@pytest.mark.parametrize("worker", ["0", "1"])
def test_unreadable_image(error_of: ErrorOf, tmp_path: Path, worker: str) -> None:
    """The file is named."""
    folder = images(tmp_path / "i", {"cat": 5, "dog": 5})
    (folder / "dog" / "2.png").write_bytes(b"\x89PNG nothing more")
    text = error_of(*on_images(folder), "--num_workers", worker)
    assert str(folder / "dog" / "2.png") in text and "replace or remove it" in text


@pytest.mark.slow
def test_model_pt(error_of: ErrorOf, runs: Runs, tmp_path: Path) -> None:
    """A checkpoint that is missing, cut off, changed by one bit, no checkpoint, or another model's."""
    path = runs.train("--progress.epoch", "1", name="made") / "checkpoints" / "latest.pt"
    other = runs.train("--progress.epoch", "1", "--model.width", "6", name="other")
    whole = path.read_bytes()

    def evaluated(file: Path, *words: str) -> str:
        return error_of(
            "--model_pt", str(file), "--config", str(path.parents[1] / "config.yaml"), *words, program="evaluate"
        )

    text = evaluated(path.with_name("bets.pt"))
    assert "there is no checkpoint" in text and "best.pt" in text
    broken = path.with_name("broken.pt")
    broken.write_bytes(whole[: len(whole) // 2])
    assert "truncated" in evaluated(broken)
    weights = load(path.parents[1])["model"]["features.0.0.weight"].numpy().tobytes()
    at = whole.index(weights)
    broken.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "checksum" in evaluated(broken)
    torch.save({"weights": torch.ones(2)}, broken)
    text = evaluated(broken)
    assert "is not a checkpoint" in text and "if it holds only weights" in text and "--init_from.path" in text
    broken.write_text("hello")
    assert "not a checkpoint" in evaluated(broken)
    text = evaluated(other / "checkpoints" / "latest.pt")
    assert "is of a different model" in text and "size mismatch for model.features.0.0.weight" in text
    assert "model_pt: which checkpoint?" in error_of("--config", "configs/eval.yaml", program="evaluate")
    assert error_of("--dist.processes", "2", program="evaluate").count("model_pt: which checkpoint?") == 1
    script = run(["sh", str(PROJECT / "scripts" / "eval.sh")], env={**ENVIRONMENT, "PYTHON": sys.executable})
    assert "model_pt: which checkpoint?" in script.stderr and script.returncode == 2
    assert "there is no checkpoint" in error_of("--model_pt", str(tmp_path / "none.pt"), program="evaluate")
    (tmp_path / "alone.pt").write_bytes(whole)
    assert evaluate.main(["--model_pt", str(tmp_path / "alone.pt"), "--split", "val"]) == 0, "with its own config"


def test_more_classes_than_the_model_has(error_of: ErrorOf, tmp_path: Path) -> None:
    """Said before training, with the number that is right."""
    folder = images(tmp_path / "i", {"cat": 2, "dog": 2, "emu": 2})
    text = error_of(*on_images(folder))
    assert "dataset.train has 3 classes (cat, dog, emu); use --model.classes 3" in text


def test_a_checkpoint_runs_no_code(error_of: ErrorOf, tmp_path: Path) -> None:
    """A file that would execute something is refused, and nothing happens."""
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (canary,))

    torch.save({"format": 1, "model": Evil()}, tmp_path / "evil.pt")
    text = error_of("--model_pt", str(tmp_path / "evil.pt"), "--config", "configs/eval.yaml", program="evaluate")
    assert "cannot be loaded" in text
    assert not canary.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, so asking for it is no mistake")
def test_a_gpu_that_is_not_there(error_of: ErrorOf) -> None:
    """Said before anything else, with the remedy."""
    text = error_of("--gpu_ids", "0")
    assert "gpu_ids: 0" in text and "--gpu_ids -1" in text


def test_more_devices_than_processes(monkeypatch: pytest.MonkeyPatch, error_of: ErrorOf) -> None:
    """Asking for devices that get no process is refused, with what would be right."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one", "MASTER_PORT": "29500"}
    with monkeypatch.context() as launched:
        for name, value in place.items():
            launched.setenv(name, value)
        text = error_of("--gpu_ids", "0,1,2")
    assert "3 device(s)" in text and "1 process(es)" in text and "start 3, or name 1 device(s)" in text
    assert "PyTorch finds 4 CUDA device(s)" in error_of("--gpu_ids", "4")


def test_resume_without_checkpoints(error_of: ErrorOf, tmp_path: Path) -> None:
    """A folder with nothing in it, and a file that is not there."""
    (tmp_path / "empty").mkdir()
    assert f"there is no checkpoint {tmp_path / 'empty'}" in error_of("--resume", str(tmp_path / "empty"))
    assert "there is no checkpoint" in error_of("--resume", str(tmp_path / "none.pt"))


def test_resume_with_another_model(error_of: ErrorOf, runs: Runs) -> None:
    """Every key that differs is listed."""
    folder = runs.train("--progress.epoch", "1", name="first")
    text = error_of("--resume", str(folder), "--model.width", "6")
    assert "or accept these: --allow_changes true" in text
    assert "--init_from.path FILE --name NEW" in text
    text = error_of("--resume", str(folder), "--model.width", "6", "--allow_changes", "true")
    assert "size mismatch for model.features.0.0.weight" in text


def test_a_refused_resume_leaves_the_run_as_it_was(error_of: ErrorOf, runs: Runs) -> None:
    """Its state and its config, which evaluate.py and the next resume read."""
    folder = runs.train("--progress.epoch", "1")
    before = {name: (folder / name).read_text() for name in ("run.json", "status.json")}
    assert "batch_size" in error_of("--resume", "auto", "--batch_size", "16", "--model.width", "6")
    assert {name: (folder / name).read_text() for name in before} == before
    assert [file.name for file in folder.glob("config*.yaml")] == ["config.yaml"]
    assert evaluate.main(["--model_pt", str(folder / "checkpoints" / "latest.pt")]) == 0
    assert train.main(["--resume", str(folder), "--progress.epoch", "2"]) == 0


def test_a_refused_resume_from_an_older_checkpoint_undoes_nothing(error_of: ErrorOf, runs: Runs) -> None:
    """The later checkpoints and measurements stay; so they do where a plug-in has a wrong name."""
    folder = runs.train("--progress.epoch_save_checkpoint", "1")
    before = {path.name: path.stat().st_ino for path in (folder / "checkpoints").iterdir()}
    measured = (folder / "metrics.jsonl").read_text()
    older = ["--resume", str(folder / "checkpoints" / "step_00000005.pt")]
    assert "optim.lr" in error_of(*older, "--optim.lr", "5")
    assert "nowhere" in error_of(*older, "--plugins", "[nowhere:x]")
    unlabelled = "{type: Accuracy, inputs: {label: batch.nothing}}"  # seen when a batch is tried
    assert "batch.nothing" in error_of(*older, "--metric.other", unlabelled)
    assert {path.name: path.stat().st_ino for path in (folder / "checkpoints").iterdir()} == before
    assert (folder / "metrics.jsonl").read_text() == measured
    assert train.main(runs.words(*older)) == 0
    assert (folder / "checkpoints" / "abandoned_step_00000010.pt").exists()
    assert (folder / "metrics.jsonl").read_text() != measured


def test_a_resume_of_nothing() -> None:
    """Without --config, whose absence is not the mistake."""
    with pytest.raises(UserError, match="--resume experiments/nope: there is no such run or checkpoint"):
        train.main(["--resume", "experiments/nope"])


def test_changes_are_allowed_for_one_resume(error_of: ErrorOf, runs: Runs) -> None:
    """The run's own config, which the next resume reads, has the key too."""
    folder = runs.train("--progress.epoch", "1")
    more = ["--resume", str(folder), "--progress.epoch"]
    assert train.main([*more, "2", "--optim.lr", "0.1", "--allow_changes"]) == 0
    assert train.main([*more, "3"]) == 0
    with pytest.raises(SystemExit):
        train.main([*more, "4", "--optim.lr", "0.2"])


def test_a_loss_that_is_not_a_number(error_of: ErrorOf, runs: Runs) -> None:
    """Stops before a checkpoint is overwritten, names the step and the last good file."""
    loss = "{$REPLACE: true, entropy: {type: tests.small.NotANumber, after: 7}}"
    text = error_of("--loss", loss, "--progress.log_every", "100")
    assert "the loss of step 8 is not a finite number" in text
    latest = runs.root / "run" / "checkpoints" / "latest.pt"
    assert f"the last good checkpoint is {latest}" in text
    assert load(runs.root / "run")["position"]["step"] == 5
    assert all(value.isfinite().all() for value in load(runs.root / "run")["model"].values())


def test_nothing_to_minimise(error_of: ErrorOf) -> None:
    text = error_of("--loss.CrossEntropyLoss.weight", "0", "--best.metric", "Accuracy")
    assert "ClassificationTask has no `loss` to minimise in update all" in text


def test_best_of_something_that_is_not_measured(error_of: ErrorOf) -> None:
    text = error_of("--best.metric", "Acuracy")
    assert "best.metric" in text and "did you mean Accuracy?" in text


def test_a_run_folder_that_cannot_be_made(error_of: ErrorOf, tmp_path: Path) -> None:
    """B10: said in the first second."""
    (tmp_path / "file").write_text("")
    assert "file" in error_of("--dir.runs_dir", str(tmp_path / "file"))
    assert "name: 'a/b' cannot name a folder" in error_of("--name", "a/b")
    text = error_of("--name", "é" * 150)
    assert "File name too long" in text


def test_splits_with_other_classes(error_of: ErrorOf, tmp_path: Path) -> None:
    """Label 1 must mean the same in training and validation."""
    train_folder, val_folder = (
        images(tmp_path / "t", {"cat": 2, "dog": 2}),
        images(tmp_path / "v", {"bird": 2, "dog": 2}),
    )
    part = "{type: ImageFolderDataset, size: [8, 8], folder: "
    data = f"{{train: {part}{train_folder}}}, val: {part}{val_folder}}}, eval: null}}"
    text = error_of("--dataset", data, "--model.in_channels", "3")
    assert "dataset.val has the classes bird, dog, but dataset.train has cat, dog" in text
    years = "{type: engine.config.test_bad_input.Years}"
    text = error_of("--dataset.train", years, "--dataset.val", years)
    assert "dataset.val has the classes 2001, 2002, but dataset.train has 1999, 2000" in text


class Years(DigitsDataset):
    """Its classes have numbers for names."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.classes = (1999, 2000) if mode == "train" else (2001, 2002)  # type: ignore[assignment]


def test_a_gradient_that_is_not_a_number(error_of: ErrorOf, runs: Runs) -> None:
    """A finite loss with such a gradient must not reach a checkpoint either."""
    words = [
        "--loss",
        "{$REPLACE: true, ce: {type: tests.small.NanGradient, at: 7}}",
        "--progress.epoch_save_latest",
        "1step",
    ]
    text = error_of(*words)
    assert "the gradient of step 7, of train samples" in text
    assert load(runs.root / "run")["position"]["step"] == 6
    assert all(value.isfinite().all() for value in load(runs.root / "run")["model"].values())


BOMBS = {
    "lists": [f"x{at}: &x{at} [{', '.join([f'*x{at - 1}'] * 10)}]" for at in range(1, 10)],
    "mappings": [f"x{at}: &x{at} {{a: *x{at - 1}, b: *x{at - 1}}}" for at in range(1, 31)],
    "merge keys": [f"x{at}: &x{at} {{<<: [{', '.join([f'*x{at - 1}'] * 10)}]}}" for at in range(1, 10)],
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("way", ["file", "option", "stored"])
def test_aliases_that_stand_for_more_than_memory_holds(error_of: ErrorOf, tmp_path: Path, kind: str, way: str) -> None:
    """Thirty lines for 10^9 values, anywhere that YAML is read: refused at once, with the line and the rule."""
    lines = ["x0: &x0 {a: 1}", *BOMBS[kind]]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join([f"name: a\nmodel: {{type: ConvModel, {lines[0]}}}", *lines[1:]]))
    if way == "stored":
        (tmp_path / "run.json").touch()
    text = error_of(f"--model={{{', '.join(lines)}}}") if way == "option" else error_of("--config", str(file))
    assert "more than 100,000 values; use fewer aliases (*name)" in text
    assert ("command line" if way == "option" else f"{file}:") in text


def test_ordinary_aliases_and_merge_keys(tmp_path: Path) -> None:
    """They work as before: a list used many times, and a section laid under another."""
    file = tmp_path / "config.yaml"
    parts = ["&part {type: DigitsDataset, eval_batch_size: 32}", "{<<: *part, eval_batch_size: 64}"]
    sets = ", ".join(f"s{at}: *part" for at in range(100))
    file.write_text(
        f"best: {{metric: first.loss}}\ndataset: {{val: {{first: {parts[0]}, second: {parts[1]}, {sets}}}}}"
    )
    val = resolve(Config, [file]).config.dataset.val
    assert val is not None and len(val) == 102
    assert [val[name]["eval_batch_size"] for name in ("first", "second", "s99")] == [32, 64, 32]


def test_a_config_without_its_option() -> None:
    """Both mistakes are named: the word that was typed, and the option that is missing."""
    done = run([sys.executable, "train.py", "configs/default.yaml"])
    assert done.returncode == 2
    assert "unexpected argument 'configs/default.yaml'; write --key value" in done.stderr
    assert "--config\n      needs a file" in done.stderr


def test_an_option_without_its_value(error_of: ErrorOf) -> None:
    text = error_of("--optim.lr")
    assert " optim.lr (command line: --optim.lr) needs a value" in text


@pytest.mark.parametrize("option", ["--list", "--help", "--print-config"])
def test_a_reader_that_leaves_early(option: str) -> None:
    """As `| head -1` does: no error is printed."""
    words = [sys.executable, "train.py", "--config", str(CONFIG), option]
    started = subprocess.Popen(words, cwd=PROJECT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    assert started.stderr.read() == b""
    assert started.wait() == -signal.SIGPIPE
