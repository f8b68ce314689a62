"""The log and the progress bar: who said it, where it is kept, who sees it."""

import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
from loguru import logger

from common.base.files import Appender
from common.monitor.log import setup_log
from engine.monitor.pseudo_terminal import in_terminal

pytestmark = pytest.mark.usefixtures("restored_log")


def here() -> int:
    """Line of the caller."""
    return sys._getframe(1).f_lineno


def test_every_record_names_its_true_caller(tmp_path):
    """Loguru, `logging`, `warnings`."""
    file = tmp_path / "train.log"
    setup_log(file=Appender(file))
    logger.info("one"), logger.opt(exception=False).info("{}", "{two}")
    first = here()
    logging.getLogger("some.library").info("three {braces}")
    third = here()
    warnings.warn("four", stacklevel=1)
    fourth = here()
    text = file.read_text()
    for word, row in {"one": first, "{two}": first, "three {braces}": third}.items():
        (line,) = (line for line in text.splitlines() if line.endswith(word))
        assert re.search(rf" {re.escape(__name__)}:{row - 1} ", line)
    assert f"{__file__}:{fourth - 1}: UserWarning: four" in text


def test_early_lines_are_in_the_file(tmp_path):
    """What was logged before the folder was there; a second run gets none of the first one's."""
    file = tmp_path / "train.log"
    for _ in range(2):
        setup_log()
        logger.info("early")
        setup_log(file=Appender(file))
        logger.info("later")
    assert [line.split()[-1] for line in file.read_text().splitlines()] == ["early", "later"] * 2


def test_other_ranks_have_a_file_and_show_errors(tmp_path, capsys):
    """Nothing of theirs is lost, and their errors reach the terminal, with the rank."""
    setup_log(rank=2, file=Appender(tmp_path / "train.rank2.log"))
    logger.info("quiet")
    logger.error("loud")
    shown = capsys.readouterr().err
    assert "rank 2: loud" in shown
    assert "quiet" not in shown
    assert [line.split()[-1] for line in (tmp_path / "train.rank2.log").read_text().splitlines()] == ["quiet", "loud"]


def test_libraries_do_not_flood_the_debug_log(tmp_path, capsys):
    """At DEBUG Pillow logs every block of every PNG; libraries are heard from INFO on."""
    setup_log("DEBUG")
    logging.getLogger("PIL.PngImagePlugin").debug("STREAM")
    logger.debug("ours")
    shown = capsys.readouterr().err
    assert "ours" in shown
    assert "STREAM" not in shown


def test_a_traceback_shows_no_values(tmp_path, capsys):
    """Values of variables in a traceback would be data, or a password."""
    password = "canary-4711"  # pragma: allowlist secret
    setup_log(file=Appender(tmp_path / "train.log"))
    try:
        _ = int(password[:0])
    except ValueError:
        logger.exception("failed")
    text = (tmp_path / "train.log").read_text()
    assert "ValueError" in text
    assert Path(__file__).name in text
    assert password not in text + capsys.readouterr().err


@pytest.mark.slow
def test_a_bar_is_not_torn(tmp_path):
    """On a terminal a line of the log clears the bar, and the bar comes back below it."""
    code = (
        "from common.distributed import Rank\n"
        "from common.monitor.monitor import Monitor, MonitorConfig\n"
        "from common.monitor.log import logger, setup_log\n"
        "from common.progress import Position\n"
        "from common.run.folder import open_run\n"
        "from common.run.paths import RunPaths\n"
        "from pathlib import Path\n"
        "setup_log()\n"
        "from common.run.record import describe_start\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "attempt, patch = describe_start(folder, ['train.py'], 0, Rank())\n"
        "run = open_run(RunPaths(folder), {}, attempt, patch, resume=False)\n"
        "monitor = Monitor(MonitorConfig(writers=[]), Rank(), run, resume_step=None, values={})\n"
        "with monitor.training(Position(), 10, None):\n"
        "    monitor.step_done(Position(step=1), 4); logger.info('a line')\n"
        "run.close()"
    )
    shown = in_terminal([sys.executable, "-c", code], 120).raw
    before, _, after = shown.partition("a line")
    assert "0/10" in before
    assert before.rsplit("\r", 1)[-1].startswith("\x1b[32m")  # the line starts where the bar was cleared
    assert "/10" in after
