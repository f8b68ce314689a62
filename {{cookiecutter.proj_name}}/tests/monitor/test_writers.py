"""`monitor.writers`: where curves go."""

from collections.abc import Mapping

from common.monitor.writer import Writer, WriterRun
from tests.conftest import Runs

HERE = "tests.monitor.test_writers"


class Diary(Writer):
    """Writes a line for each call."""

    name = "diary.txt"

    def __init__(self, run: WriterRun, title: str) -> None:
        self.file = (run.folder / self.name).open("a")
        self.file.write(f"{title} {run.name} {run.config['model']['width']} {run.resume_step}\n")

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        self.file.write(f"{event} {step} {' '.join(values)}\n")

    def text(self, step: int, tag: str, text: str) -> None:
        self.file.write(f"{tag} {step} {text.count('30,762') + text.count('width: 4') + text.count('train.py')}\n")

    def close(self, state: str) -> None:
        self.file.write(state)
        self.file.close()


class Broken(Diary):
    """A service that is down."""

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no route to host")


class Second(Diary):
    """Another one, beside the one that is down."""

    name = "second.txt"


def test_a_class_of_the_users(runs: Runs) -> None:
    """By import path; a resume tells it from which step it continues."""
    writers = f"[{{type: {HERE}.Diary, title: dear}}]"
    folder = runs.train("--monitor.writers", writers, "--progress.max_steps", "6", "--progress.epoch_val", "4step")
    runs.train("--monitor.writers", writers, "--progress.max_steps", "8", "--resume", "auto")
    diary = (folder / "diary.txt").read_text()
    assert diary.startswith("dear run 4 None\nrun/config 0 1\nrun/environment 0 1\nrun/model 0 ")
    for line in ("train 2 loss grad_norm lr", "val 4 loss Accuracy", "finisheddear run 4 6"):
        assert f"\n{line}\n" in f"\n{diary}".replace("finisheddear", "\nfinisheddear")
    assert diary.endswith("finished")


def test_a_writer_that_fails_does_not_end_the_training(runs: Runs) -> None:
    """One warning, and the others continue; it is not tried again."""
    writers = f"[{{type: {HERE}.Broken, title: x}}, {{type: {HERE}.Second, title: y}}]"
    folder = runs.train("--monitor.writers", writers, "--progress.epoch", "5")
    log = (folder / "train.log").read_text()
    assert log.count("no route to host") == 1
    assert f"writer {HERE}.Broken failed: ConnectionError: no route to host; metrics.jsonl will have" in log
    assert (folder / "second.txt").read_text().count("\nval ") == 5
    diary = (folder / "diary.txt").read_text()
    assert (diary.count("x run 4 None"), diary.count("run/config")) == (1, 1)
