"""The stored config of an earlier run: keys that are gone, and values that do not fit."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.folder import CheckpointFolder
from common.config import ConfigError, dump, resolve
from common.failure.program import report_errors
import evaluate
import predict
import train
from tests.conftest import Runs, load
from custom.config import Config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Runs(tmp_path_factory.mktemp("runs")).train("--progress.epoch", "1")


@pytest.fixture
def old(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def change(run: Path, **config: Any) -> None:
    """Store other values in the run, or none for `...`, in its config and in its checkpoints, as an earlier version."""
    state = load(run)
    for key, value in config.items():
        *above, name = key.split("__")
        part = state["about"]["config"]
        for each in above:
            part = part[each]
        part[name] = value
        if value is ...:
            del part[name]
    (run / "config.yaml").write_text(dump(state["about"]["config"]))
    CheckpointFolder(run / "checkpoints").save(state, best=True)


@pytest.fixture(params=["evaluate", "resume", "predict", "config"])
def use(request: pytest.FixtureRequest, old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Use the run in one of the ways that read its stored config; what a person reads."""

    def call(*more: str) -> str:
        best, here = str(old / "checkpoints" / "best.pt"), ["--dir.runs_dir", str(old.parent)]
        shutil.copy("docs/run.svg", tmp_path / "a.png")  # no picture: reading it comes after the config
        mains: dict[str, Any] = {
            "evaluate": lambda: evaluate.main(["--model_pt", best, *more]),
            "resume": lambda: train.main(["--resume", str(old), *here, "--progress.epoch", "2", *more]),
            "predict": lambda: predict.main(["--model_pt", best, "--input", str(tmp_path / "a.png"), *more]),
            "config": lambda: train.main(["--config", str(old / "config.yaml"), *here, "--name", "again", *more]),
        }
        with pytest.raises(SystemExit) as left, report_errors():
            raise SystemExit(mains[request.param]())
        said = capsys.readouterr().err
        return said if left.value.code == 0 or "have no prediction" in said else f"refused: {said}"

    return call


def test_keys_of_an_earlier_version(use: Any, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are listed with their values, once."""
    change(old, mix={"alpha": 0.25}, model__gone=3, progress__keep=7)
    said = " ".join(use().split())
    assert "refused" not in said
    assert said.count("mix = {'alpha': 0.25}") == 1
    assert said.count("model.gone = 3") == 1
    assert said.count("progress.keep = 7") == 1


def test_a_value_that_does_not_fit(use: Any, old: Path) -> None:
    """It is refused with its place in a file that exists; another value can be given."""
    change(old, optim__lr="fast")
    said = use()
    assert said.startswith("refused") and "optim.lr = 'fast'" in said and "temporary" not in said
    assert str(old) in said
    assert "refused" not in use("--optim.lr", "0.001", "--allow_changes", "true")


def test_what_a_person_writes_is_not_a_record(old: Path, tmp_path: Path) -> None:
    """The same keys in another file."""
    change(old, mix={"alpha": 0.25})
    file = Path(shutil.copy(old / "config.yaml", tmp_path / "mine.yaml"))
    with pytest.raises(ConfigError, match="unknown key"):
        train.main(["--config", str(file)])


def test_arguments_of_schedules_were_keys() -> None:
    """Those of before are named, not used; those of today are typed."""
    old = {"type": "plateau", "patience": 0, "threshold": 0.1}
    found = resolve(Config, [], ["--optim.lr_scheduler.args.patience", "3"], stored={"optim": {"lr_scheduler": old}})
    assert found.config.optim.lr_scheduler.args == {"patience": 3}
    assert "optim.lr_scheduler.patience = 0" in found.warnings[0]
    assert "optim.lr_scheduler.threshold = 0.1" in found.warnings[0]
