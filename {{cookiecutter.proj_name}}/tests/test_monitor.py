"""What a run tells: the log, the metrics, the pictures and the meters they come from."""

import json
import logging
import math
import os
import pty
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from loguru import logger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.dist import Rank
from common.evaluation import Evaluation
from common.monitor import Monitor, MonitorConfig, bar
from common.monitor.clock import Clock, Timing, peak_memory
from common.monitor.line import clock_time, evaluation_line, learning_rates, number, size, train_line
from common.monitor.log import setup_log
from common.monitor.meter import Meter, Reading
from common.monitor.pictures import Picture, grid, labelled, progress_path, save_png, to_rgb
from common.monitor.writer import Writer, read_metrics
from common.period import Position
from common.run import DirConfig, OpenRun, RunFolder, open_run, read_status

PROJECT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _restored_log() -> Iterator[None]:
    """What `setup_log` changes is global; put it back."""
    handlers, level, show = logging.root.handlers[:], logging.root.level, warnings.showwarning
    yield
    logger.remove()
    logger.add(sys.stderr)
    logger.configure(patcher=lambda record: None)
    logging.root.handlers[:], warnings.showwarning = handlers, show
    logging.root.setLevel(level)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenRun]:
    with open_digits(tmp_path) as run:
        yield run


def open_digits(project: Path, *, resume: bool = False) -> OpenRun:
    folder = RunFolder.of(DirConfig(), "digits", project)
    return open_run(folder, resume=resume, resolved_values={}, argv=[], seed=0, world_size=1, project=project)


def here() -> str:
    """`tests/test_monitor.py:<line of the caller>`."""
    return f"tests/{Path(__file__).name}:{sys._getframe(1).f_lineno}"


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def losses(total: float, **parts: float) -> dict[str, object]:
    """As `LossFactory` gives them: part of a graph."""
    made = {name: torch.tensor(value, requires_grad=True) * 1 for name, value in parts.items()}
    return {"names": list(parts), "sum": torch.tensor(total, requires_grad=True) * 1, **made}


# ---- the log


def test_every_record_names_its_true_caller(tmp_path, capsys):
    """CT-55, D-28, R-12, MM-25, QQ-50: loguru, `logging` (through a wrapper too), `warnings`; in file and terminal."""

    def wrapper(text: str) -> None:
        logging.getLogger("some.library").info(text, stacklevel=2)

    file = tmp_path / "train.log"
    setup_log(file=file)
    logger.info("one"), logger.opt(exception=False).info("{}", "{two}")
    first = here()
    wrapper("three {braces}")
    third = here()
    warnings.warn("four", stacklevel=1)
    fourth = here()
    text = file.read_text()
    for line in (*text.splitlines(), *capsys.readouterr().err.splitlines()):
        expected = {"three": third, "UserWarning: four": fourth}
        place = next((place for word, place in expected.items() if word in line), first)
        name, _, row = place.partition(":")
        assert f"{name}:{int(row) - 1} " in line
    assert "three {braces}" in text
    assert "{two}" in text
    assert len(text.splitlines()) == 4


def test_the_log_is_appended_to_with_a_line_between(tmp_path):
    """CT-55, D-27: a resume adds to the file; what was logged before the folder was there is in it too."""
    file = tmp_path / "train.log"
    setup_log()
    logger.info("early")
    setup_log(file=file, banner="resumed at step 12, attempt 2")
    logger.info("first attempt")
    assert "resumed" not in file.read_text()
    setup_log()
    logger.info("early again")
    setup_log(file=file, banner="resumed at step 12, attempt 2")
    logger.info("second attempt")
    text = file.read_text()
    order = ["early", "first attempt", "resumed at step 12, attempt 2", "early again", "second attempt"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert len(text.splitlines()) == 6


def test_other_ranks_have_a_file_and_show_errors(tmp_path, capsys):
    """D-29, MM-25: nothing of theirs is lost, and their errors reach the terminal, with the rank."""
    setup_log(rank=2, file=tmp_path / "train.rank2.log")
    logger.info("quiet")
    logger.error("loud")
    shown = capsys.readouterr().err
    assert "rank 2: loud" in shown
    assert "quiet" not in shown
    assert [line.split()[-1] for line in (tmp_path / "train.rank2.log").read_text().splitlines()] == ["quiet", "loud"]


def test_levels_by_module(tmp_path, capsys):
    """R-12: one module, or one library, can be heard better than the rest."""
    setup_log("WARNING", {__name__: "DEBUG", "some.library": "DEBUG"})
    logger.debug("mine")
    logging.getLogger("some.library.part").debug("theirs")
    logging.getLogger("another").info("another's")
    shown = capsys.readouterr().err
    assert "mine" in shown
    assert "theirs" in shown
    assert "another's" not in shown
    setup_log("WARNING", {"common": "DEBUG"})
    logger.info("hidden")
    assert capsys.readouterr().err == ""


def test_libraries_do_not_flood_the_debug_log(tmp_path, capsys):
    """R-12: at DEBUG Pillow logs every block of every PNG; only by name is a library heard at that level."""
    setup_log("DEBUG")
    logging.getLogger("PIL.PngImagePlugin").debug("STREAM")
    logger.debug("ours")
    shown = capsys.readouterr().err
    assert "ours" in shown
    assert "STREAM" not in shown


def test_a_traceback_shows_no_values(tmp_path, capsys):
    """CT-55: values of variables in a traceback would be data, or a password."""
    password = "canary-4711"
    setup_log(file=tmp_path / "train.log")
    try:
        _ = int(password[:0])
    except ValueError:
        logger.exception("failed")
    text = (tmp_path / "train.log").read_text()
    assert "ValueError" in text
    assert "test_monitor.py" in text
    assert password not in text + capsys.readouterr().err


def test_a_bar_is_not_torn(tmp_path):
    """QQ-51: on a terminal a line of the log clears the bar, and the bar comes back below it."""
    code = (
        "from common.monitor.bar import Bar; from common.monitor.log import setup_log; from loguru import logger\n"
        "setup_log(); bar = Bar(10, 0); bar.step(); logger.info('a line'); bar.note('loss 1'); bar.close()"
    )
    shown = in_terminal(code)
    before, _, after = shown.partition("a line")
    assert "0/10" in before
    assert before.rsplit("\r", 1)[-1].startswith("\x1b[32m")  # the line starts where the bar was cleared
    assert "/10" in after


def in_terminal(code: str) -> str:
    """What a Python program writes to a terminal of 120 columns."""
    import fcntl
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "SLURM_JOB_ID")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=child, stdout=child, env={**environment, "PYTHONPATH": str(PROJECT)}
    )
    os.close(child)
    shown = b""
    try:
        while block := os.read(parent, 4096):
            shown += block
    except OSError:  # Linux reports the closed end so
        pass
    os.close(parent)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize(
    ("terminal", "slurm", "wanted"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_bar_only_where_somebody_watches(monkeypatch, terminal, slurm, wanted):
    """QQ-51: not in a file, not in a Slurm job, unless it is asked for."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert bar.wants_bar("auto") is wanted
    assert bar.wants_bar("on")
    assert not bar.wants_bar("off")


# ---- metrics


def test_metrics_keep_every_digit(tmp_path):
    """R-45, D-57, MM-27, QQ-49: one JSON object a line, the run first, numbers to the last bit."""
    path = tmp_path / "metrics.jsonl"
    values = {"loss": 0.1 + 0.2, "tiny": 5e-324, "acc": float(np.float32(0.1))}
    writer = Writer(path, None, run_id="digits_1")
    writer.scalars("train", 3, values, epoch=1)
    writer.record("checkpoint", step=3, files=[Path("latest.pt")])
    lines = path.read_text().splitlines()  # before close: a killed process loses nothing
    writer.close()
    assert lines == [json.dumps(json.loads(line)) for line in lines]
    head, train, saved = read_metrics(path)
    assert (head["event"], head["schema"], head["run"], head["attempt"]) == ("run", 1, "digits_1", 1)
    assert train == {"event": "train", "step": 3, "epoch": 1, "values": values}
    assert saved["files"] == ["latest.pt"]


def test_numbers_that_json_does_not_have(tmp_path):
    """R-45: the file stays valid JSON; the reader gives floats back, and leaves words alone."""
    path = tmp_path / "metrics.jsonl"
    writer = Writer(path, None, run_id="a")
    writer.scalars("train", 1, {"a": math.nan, "b": math.inf, "c": -math.inf}, note="nan")
    writer.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(path.read_text().splitlines()[1], parse_constant=refuse)
    entry = read_metrics(path)[1]
    assert math.isnan(entry["values"]["a"])
    assert (entry["values"]["b"], entry["values"]["c"], entry["note"]) == (math.inf, -math.inf, "nan")


def test_a_resume_leaves_no_point_twice(tmp_path):
    """D-48, CT-58, R-05: in metrics and TensorBoard what came after the checkpoint goes; the rest stays."""
    path, event = tmp_path / "metrics.jsonl", tmp_path / "event"
    writer = Writer(path, event, run_id="a")
    for step in range(1, 8):
        writer.scalars("train", step, {"loss": float(step)})
    writer.close()
    with path.open("a") as file:
        file.write('{"event": "train", "step": 8, "val')  # killed in the middle of a line
    writer = Writer(path, event, run_id="a", attempt=2, resume_step=4)
    for step in range(5, 7):
        writer.scalars("train", step, {"loss": float(-step)})
    writer.close()
    entries = read_metrics(path)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, -5.0), (6, -6.0)]
    assert [(entry["step"], entry["values"]["loss"]) for entry in entries if entry["event"] == "train"] == expected
    assert [entry.get("attempt") for entry in entries if entry["event"] == "run"] == [1, 2]
    assert [(point.step, point.value) for point in events(event).Scalars("train/loss")] == expected
    assert sorted(tmp_path.iterdir()) == [event, path]


def test_a_kill_while_the_metrics_are_cut_loses_nothing(tmp_path, monkeypatch):
    """D-48: the file is replaced in one move."""
    path = tmp_path / "metrics.jsonl"
    writer = Writer(path, None, run_id="a")
    writer.scalars("train", 9, {"loss": 1.0})
    writer.close()
    before = path.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        Writer(path, None, run_id="a", attempt=2, resume_step=0)
    assert path.read_text() == before


def test_flush_brings_tensorboard_to_the_disk(tmp_path):
    """CT-58, D-48: what was measured before a checkpoint can be read while the run goes on."""
    writer = Writer(tmp_path / "m", tmp_path / "event", run_id="a")
    writer.scalars("val", 5, {"loss": 0.25})
    writer.image(5, "val/00", np.full((4, 6, 3), (255, 0, 10), np.uint8))
    writer.flush()
    read = events(tmp_path / "event")
    (image,) = read.Images("val/00")
    assert (image.step, image.height, image.width) == (5, 4, 6)
    assert [(point.step, point.value) for point in read.Scalars("val/loss")] == [(5, 0.25)]
    writer.close()


def test_without_tensorboard_a_run_goes_on(tmp_path, monkeypatch):
    """R-05: it is told once what is missing; metrics are written all the same."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    lines: list[str] = []
    logger.add(lines.append, format="{message}")
    writer = Writer(tmp_path / "metrics.jsonl", tmp_path / "event", run_id="a")
    writer.scalars("train", 1, {"loss": 1.0})
    writer.scalars("train", 2, {"loss": 1.0})
    writer.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert len([line for line in lines if "pip install tensorboard" in line]) == 1


# ---- pictures


@pytest.mark.parametrize(
    "image",
    [
        np.full((4, 3), 1.0),
        np.full((4, 3, 1), 255, np.uint8),
        np.full((4, 3, 3), 2.0, np.float32),
        torch.ones(4, 3, 4),
        np.full((4, 3), 300),
    ],
)
def test_images_of_every_kind_become_rgb(image):
    """CT-59: grey or coloured, 0..1 or 0..255; what is outside is cut off, not wrapped around."""
    assert to_rgb(image).tolist() == np.full((4, 3, 3), 255).tolist()


def test_an_image_of_another_shape_is_refused():
    """CT-59: channels first is the usual mistake; the shape is named."""
    with pytest.raises(ValueError, match=r"\(3, 8, 8\)"):
        to_rgb(np.zeros((3, 8, 8)))


def test_a_labelled_picture_shows_image_frame_and_text():
    """CT-59: the frame tells right from wrong, the text is below, and a digit of 8 x 8 is large enough to see."""
    image = np.zeros((8, 8))
    image[2, 3] = 1.0
    right = labelled(image, "3 -> 3", ok=True).image
    wrong = labelled(image, "3 -> 5", ok=False).image
    assert right.shape == wrong.shape
    assert min(right.shape[:2]) >= 100
    middle = right.shape[1] // 2
    assert right[1, middle].argmax() == 1
    assert wrong[1, middle].argmax() == 0
    assert (right == 255).all(axis=2)[4:116].sum() == 14 * 14  # one pixel, fourteen times as large, in the frame
    assert (right[-20:] != wrong[-20:]).any()
    assert (labelled(image, "").image.shape[0]) < right.shape[0]


def test_any_text_can_be_drawn():
    """CT-59: a long one makes the picture wider; letters the font does not have do not stop a run."""
    narrow, wide = labelled(np.zeros((8, 8)), "a"), labelled(np.zeros((8, 8)), "é→ 漢字 " + "long " * 20)
    assert wide.image.shape[1] > 2 * narrow.image.shape[1]


def test_a_grid_holds_every_picture():
    """CT-59: of any sizes, in reading order."""
    pictures = [Picture(str(level), np.full((10 + level, 20, 3), level, np.uint8)) for level in (10, 20, 30, 40, 50)]
    sheet = grid(pictures, columns=2)
    top = {level: np.argwhere(sheet[..., 0] == level).min(axis=0).tolist() for level in (10, 20, 30, 40, 50)}
    assert top[10][1] < top[20][1]
    assert top[10][0] < top[30][0] < top[50][0]
    assert {level: int((sheet[..., 0] == level).sum()) for level in top} == {level: (10 + level) * 20 for level in top}


def test_picture_files_sort_by_step_and_stay_in_their_folder(tmp_path):
    """CT-59: the listing is the order of training; a name cannot lead elsewhere."""
    steps = [(0, 5), (1, 40), (1, 100), (11, 1000), (2, 1000000)]
    paths = [progress_path(tmp_path, "val", "../a b/ü", epoch, step) for epoch, step in steps]
    assert [path.name for path in sorted(paths)] == [
        progress_path(tmp_path, "val", "x", *step).name for step in sorted(steps)
    ]
    assert {path.parent for path in paths} == {tmp_path / "val" / "a_b_ü"}
    save_png(paths[0], np.full((2, 2), 0.5))
    assert Image.open(paths[0]).getpixel((0, 0)) == (128, 128, 128)
    assert os.listdir(paths[0].parent) == [paths[0].name]


# ---- meters


def test_the_meter_reads_raw_and_smooth(tmp_path):
    """CT-56, MM-22, R-04: the last step to the last digit, and the mean over a window of samples."""
    meter = Meter(window=2)
    for step, (value, samples) in enumerate([(9.0, 64), (1.0, 30), (4.0, 10)], start=1):
        meter.add(losses(value, a=value / 2), samples)
        meter.stepped(step)
    reading = meter.read()
    assert reading.raw == {"loss": 4.0, "a": 2.0}
    assert list(reading.raw) == ["loss", "a"]
    assert reading.smooth == pytest.approx({"loss": (30 + 40) / 40, "a": (15 + 20) / 40})
    assert meter.read() == reading


def test_micro_batches_of_a_step_are_one_value():
    """CT-56: weighted by their samples, since the last one may be smaller."""
    meter = Meter()
    meter.add(losses(1.0, a=1.0), 3)
    meter.add(losses(5.0, a=5.0), 1)
    meter.stepped(1)
    assert meter.read().raw == {"loss": 2.0, "a": 2.0}


def test_adding_touches_nothing_on_the_device():
    """CT-56: no kernel runs and no graph is kept between two readings."""
    made = losses(1.0, a=1.0)
    meter = Meter()
    with torch.profiler.profile() as profile:
        meter.add(made, 4)
        meter.stepped(1)
    assert {event.key for event in profile.key_averages()} <= {"aten::detach", "detach"}
    ((_, ((_, values, _),)),) = meter._pending
    assert not any(value.requires_grad for value in values)


def test_all_losses_come_in_one_transfer(monkeypatch):
    """CT-56: however many steps and losses there are."""
    meter = Meter()
    for step in range(1, 11):
        meter.add(losses(1.0, a=1.0, b=2.0), 4)
        meter.stepped(step)
    calls = []
    to_list = torch.Tensor.tolist

    def counted(values: torch.Tensor) -> list[float]:
        calls.append(values.shape)
        return to_list(values)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a transfer of its own"))
    meter.read()
    assert calls == [(30,)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_step_that_is_no_number_is_known(bad):
    """CT-56: the first one, not the one where it was looked for; a part may be bad while the sum is not."""
    meter = Meter()
    for step in range(1, 6):
        meter.add(losses(1.0, a=bad if step in (3, 4) else 1.0), 4)
        meter.stepped(step)
    assert meter.first_bad_step() == 3
    meter.add(losses(1.0, a=1.0), 4)
    meter.stepped(6)
    assert meter.first_bad_step() == 3


def test_ranks_are_added_up_by_samples():
    """CT-56, MM-22: sums and counts, in one exchange; a rank without samples changes nothing, all see a bad one."""
    mine = [(1.0, 30), (3.0, 10), (math.nan, 0), (1.0, 4)]
    theirs = [(5.0, 10), (3.0, 30), (2.0, 8), (math.nan, 4)]
    tables: list[torch.Tensor] = []

    def feed(values: list[tuple[float, int]], reduce) -> Meter:
        meter = Meter(window=1, reduce=reduce)
        for step, (value, samples) in enumerate(values, start=1):
            meter.add(losses(value, a=value), samples)
            meter.stepped(step)
        return meter

    feed(theirs, tables.append).first_bad_step()  # keeps that rank's share

    def exchange(table: torch.Tensor) -> None:
        table += tables.pop()

    meter = feed(mine[:3], lambda table: table.add_(tables[0][:, : table.shape[1]]))
    assert meter.read().raw == {"loss": 2.0, "a": 2.0}
    meter = feed(mine, exchange)
    assert meter.first_bad_step() == 4
    assert tables == []


def test_losses_do_not_pile_up():
    """CT-56: without a log line for a long time they are read now and then."""
    meter = Meter()
    for step in range(1, 2502):
        meter.add(losses(float(step), a=1.0), 1)
        meter.stepped(step)
    assert len(meter._pending) < 1000
    assert meter.read().raw["loss"] == 2501.0


# ---- time


class FakeTime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("common.monitor.clock.perf_counter", lambda: self.now)

    def steps(self, clock: Clock, count: int, *, wait: float, work: float) -> None:
        for _ in range(count):
            self.now += wait
            clock.loaded()
            self.now += work
            clock.stepped(64)


def test_the_clock_tells_step_time_waiting_and_rest(monkeypatch):
    """CT-57, R-04, BS-17, MM-23: validation counts for the remaining time only, the first step for nothing."""
    time = FakeTime(monkeypatch)
    clock = Clock()
    time.steps(clock, 1, wait=50.0, work=50.0)  # workers start, kernels are compiled
    time.steps(clock, 10, wait=0.1, work=0.3)
    timing = clock.read(steps_left=100)
    assert (timing.step, timing.data, timing.rate) == pytest.approx((0.4, 0.25, 160.0))
    assert timing.eta == pytest.approx(40.0)
    time.now += 6.0
    clock.restart()
    time.steps(clock, 10, wait=0.1, work=0.3)
    timing = clock.read(steps_left=100)
    assert (timing.step, timing.data) == pytest.approx((0.4, 0.25))
    assert timing.eta == pytest.approx(100 * 14 / 20)
    assert clock.read().eta is None


def test_the_estimate_forgets_a_slow_beginning(monkeypatch):
    """R-04: it looks back on the last readings only."""
    time = FakeTime(monkeypatch)
    clock = Clock(window=2)
    for work in (9.0, 1.0, 1.0):
        time.steps(clock, 4, wait=0.0, work=work)
        timing = clock.read(steps_left=10)
    assert timing.eta == pytest.approx(10.0)


def test_waiting_for_data_is_worth_a_warning_once(monkeypatch):
    """R-31: with what to change; and none for a fast loop, where waiting is the cost of a call."""
    time = FakeTime(monkeypatch)
    monkeypatch.setattr("common.monitor.clock._cores", lambda: 8)
    clock = Clock()
    time.steps(clock, 100, wait=0.06, work=0.04)
    advice = clock.advice(clock.read(), workers=2)
    assert advice is not None
    assert "60% of the time" in advice
    assert "--worker 5 (now 2" in advice
    time.steps(clock, 100, wait=0.06, work=0.04)
    assert clock.advice(clock.read(), workers=2) is None
    assert "memory" in str(fresh_advice(time, wait=0.06, workers=8))
    assert fresh_advice(time, wait=0.01, workers=2) is None
    assert fresh_advice(time, wait=0.0005, work=0.0005, count=9000, workers=0) is None


def fresh_advice(time: FakeTime, *, wait: float, workers: int, work: float = 0.04, count: int = 100) -> str | None:
    clock = Clock()
    time.steps(clock, count, wait=wait, work=work)
    return clock.advice(clock.read(), workers)


def test_memory_is_this_process_own():
    """R-04: peak memory on the CPU is what the process had at most."""
    assert 2**20 < peak_memory(torch.device("cpu")) < 2**40


# ---- lines


def test_the_training_line():
    """R-04, CT-56, CT-57, MM-23, BS-17: everything in one line, in columns that do not move."""
    common = {"total_steps": 570, "epochs": 30, "memory": 430_000_000}
    first = train_line(
        Position(step=7, epoch=0, sample=448, epoch_size=1200),
        rates=[1e-3, 1e-4],
        losses=Reading({"loss": 12.3456789, "ce": 2.30258, "l2": 1e-5}, {"loss": 12.0, "ce": 2.4, "l2": 1.28e-5}),
        grad_norm=1.2,
        timing=Timing(step=0.0031, data=0.12, rate=20645.2, eta=82.4),
        **common,
    )
    second = train_line(
        Position(step=120, epoch=6, sample=0, epoch_size=1200),
        rates=[1e-3, 1e-4],
        losses=Reading({"loss": 0.0042, "ce": 0.5, "l2": 1e-5}, {"loss": 0.125, "ce": 0.5, "l2": 1e-5}),
        grad_norm=0.034567,
        timing=Timing(step=0.0117, data=0.0, rate=987.0, eta=5.0),
        **common,
    )
    assert first == (
        "epoch  1/30 step   7/570 | lr 1.00e-03/1.00e-04 | "
        "loss 12.3457 (12.0000)  ce 2.30258 (2.40000)  l2 1.0e-05 (1.3e-05) | grad 1.20000 | "
        "   3.1 ms/step data  12%  20645/s | ETA 0:01:22 | mem 410 MB"
    )
    assert second == (
        "epoch  6/30 step 120/570 | lr 1.00e-03/1.00e-04 | "
        "loss 0.00420 (0.12500)  ce 0.50000 (0.50000)  l2 1.0e-05 (1.0e-05) | grad 0.03457 | "
        "  11.7 ms/step data   0%    987/s | ETA 0:00:05 | mem 410 MB"
    )


def test_the_line_leaves_out_what_is_not_known():
    """CT-56: one loss is not said twice; without totals there is no estimate."""
    line = train_line(
        Position(step=7),
        total_steps=None,
        epochs=None,
        rates=[0.1, 0.1],
        losses=Reading({"loss": 0.5, "ce": 0.5}, {"loss": 0.5, "ce": 0.5}),
        grad_norm=None,
        timing=Timing(step=1.5, data=0.5, rate=10.0, eta=None),
        memory=3 * 2**30,
    )
    assert line == (
        "epoch 1 step 7 | lr 1.00e-01 | loss 0.50000 (0.50000) | 1500.0 ms/step data  50%     10/s | mem 3.0 GB"
    )


def test_numbers_for_people():
    """D-57, MM-22: digits whatever the size; every group's rate; long times in days."""
    values = [0.0042, 1234.56, 3e-7, 123456.7, 0.99999999, 0.0, math.nan, -2.5]
    expected = ["0.00420", "1234.56", "3.0e-07", "1.2e+05", "1.00000", "0.00000", "    nan", "-2.50000"]
    assert [number(value) for value in values] == expected
    assert learning_rates([1e-3, 1e-3, 1e-4]) == "1.00e-03/1.00e-03/1.00e-04"
    assert learning_rates([0.1 / n for n in range(1, 7)]) == "1.67e-02..1.00e-01 (6 groups)"
    assert [clock_time(value) for value in (5.4, 3723, 2 * 86400 + 61)] == ["0:00:05", "1:02:03", "2d 00:01:01"]
    assert [size(value) for value in (5 * 2**20, 1023 * 2**20)] == ["  5 MB", "1.0 GB"]


def test_the_evaluation_line():
    """CT-56, D-57: which data, where, what, over how many samples."""
    line = evaluation_line("val", Position(step=57, epoch=3), {"loss": 0.0042, "accuracy": 0.97}, 360, best=True)
    assert line == "val   epoch 3 step 57 | loss 0.00420  accuracy 0.97000 | 360 samples | best so far"


# ---- all together


def test_lines_name_the_trainer_not_the_monitor(run, tmp_path):
    """D-28, R-12: also where the monitor makes the line."""
    setup_log(file=tmp_path / "log")
    monitor = Monitor(MonitorConfig(bar="off", tensorboard=False), Rank(), run)
    at, optimizer = Position(step=1, sample=1), torch.optim.SGD([torch.zeros(1)], lr=0.5)
    monitor.train(at, optimizer, None)
    monitor.evaluation("val", at, Evaluation({}, 1))
    monitor.saved(at, [])
    monitor.end("finished", at, "")
    line = int(here().rpartition(":")[2])
    places = [text.split()[3] for text in (tmp_path / "log").read_text().splitlines()]
    assert places == [f"tests/test_monitor.py:{number}" for number in range(line - 4, line)]


def short_run(project: Path, *, resume_step: int | None = None, last: int = 3, rank: Rank | None = None) -> list[str]:
    """Three steps as the trainer takes them. Returns what was logged."""
    lines: list[str] = []
    logger.remove()
    logger.add(lines.append, format="{message}")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    picture = labelled(np.zeros((8, 8)), "3")
    with open_digits(project, resume=resume_step is not None) as run:
        opened = run if rank is None else None
        monitor = Monitor(
            MonitorConfig(bar="off"), rank or Rank(), opened, resume_step=resume_step, local_pictures=True
        )
        begin = resume_step or 0
        with monitor.training(Position(step=begin), total_steps=9, epochs=3):
            for step in range(begin + 1, last + 1):
                at = Position(step=step, epoch=0, sample=step, epoch_size=9)
                monitor.loaded()
                monitor.meter.add(losses(1.0 / step, ce=1.0 / step), 4)
                monitor.stepped(at, 4)
                monitor.train(at, optimizer, torch.tensor(2.0))
        monitor.evaluation("val", at, Evaluation({"loss": 0.5}, 7, [picture, picture]), best=True)
        monitor.pictures("train", at, [Picture("7", picture.image)])
        monitor.saved(at, [run.folder.checkpoints / "latest.pt"])
        monitor.end("finished", at, "3 epochs")
    return lines


def test_three_steps_leave_their_marks(tmp_path):
    """R-05, CT-58, CT-59, QQ-47, QQ-49, R-04: lines, metrics, TensorBoard, pictures and the end of a run."""
    lines = short_run(tmp_path)
    root = tmp_path / "experiments/digits"
    assert lines[2].startswith("epoch 1/3 step 3/9 | lr 5.00e-01 | loss 0.33333 (0.61111) | grad 2.00000 | ")
    assert lines[3].startswith("val ")
    assert lines[-2].startswith("saved latest.pt")
    assert lines[-1].startswith("finished at epoch 1, step 3: 3 epochs")
    entries = read_metrics(root / "metrics.jsonl")
    assert [entry["event"] for entry in entries] == ["run", *["train", "speed"] * 3, "val", "checkpoint", "end"]
    assert entries[5]["values"] == {
        "loss": float(np.float32(1 / 3)),
        "ce": float(np.float32(1 / 3)),
        "grad_norm": 2.0,
        "lr": 0.5,
    }
    assert [point.step for point in events(root / "event").Scalars("train/loss")] == [1, 2, 3]
    assert len(events(root / "event").Images("val/00")) == 1
    pictures = sorted(str(path.relative_to(root / "progress")) for path in root.rglob("*.png"))
    name = "epoch000001_step000003.png"
    assert pictures == [f"train/7/{name}", f"val/00/{name}", f"val/01/{name}"]
    status = read_status(RunFolder(root))
    assert status is not None
    assert (status["state"], status["step"], status["reason"]) == ("finished", 3, "3 epochs")


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path):
    """D-48, R-45: one curve, whatever was lost between the checkpoint and the kill."""
    short_run(tmp_path, last=5)
    short_run(tmp_path, resume_step=3, last=6)
    entries = read_metrics(tmp_path / "experiments/digits/metrics.jsonl")
    assert [entry["step"] for entry in entries if entry["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    heads = [entry for entry in entries if entry["event"] == "run"]
    assert [(head["attempt"], head["resume_step"]) for head in heads] == [(1, None), (2, 3)]
    assert heads[0]["run"] == heads[1]["run"]


def test_other_processes_write_nothing(tmp_path):
    """CT-55, CT-58: the same calls, null parts."""
    short_run(tmp_path, rank=Rank(rank=1))
    names = {path.name for path in (tmp_path / "experiments/digits").iterdir()}
    assert not names & {"metrics.jsonl", "event", "progress", "status.json"}
