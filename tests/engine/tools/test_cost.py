"""What runs have cost."""

import json
from pathlib import Path

import pytest

from tools.runs import __main__ as table
from tools.runs import compare
from tools.runs.read import read_run

LOG = """2026-03-01 10:00:00.000 INFO    here started
2026-03-01 10:30:00.000 INFO    here saved
====================== resumed at step 5 ======================
2026-03-02 10:00:00.000 INFO    here started
2026-03-02 11:00:00.000 INFO    here finished
"""


def made(folder: Path, *sizes: int, speed: tuple[dict[str, float], ...] = ()) -> Path:
    """Make the files of a run with so many processes in its attempts."""
    folder.mkdir(parents=True)
    attempts = [{"world_size": size, "config": "config.yaml"} for size in sizes]
    (folder / "run.json").write_text(json.dumps({"attempts": attempts}))
    (folder / "train.log").write_text(LOG)
    (folder / "config.yaml").write_text("name: made\n")
    (folder / "status.json").write_text(json.dumps({"state": "stopped", "step": 5, "reason": ""}))
    rows = [{"event": "speed", "step": 5 * at, "values": values} for at, values in enumerate(speed, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_device_hours(tmp_path: Path) -> None:
    """Each attempt with its own number of processes; as far as they are known."""
    hours = [compare.device_hours(read_run(made(tmp_path / str(sizes), *sizes))) for sizes in ((8, 2), (4,), ())]
    assert hours == [0.5 * 8 + 1.0 * 2, 1.5 * 4, 1.5]
    (tmp_path / "(4,)" / "train.log").unlink()
    assert compare.device_hours(read_run(tmp_path / "(4,)")) == 0.0


def test_the_table_has_cost_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians over the log lines, and the sum of all runs."""
    rows = tuple({"samples_per_second": rate, "tokens_per_second": 9 * rate, "mfu": 0.25} for rate in (1.0, 30.0, 20.0))
    made(tmp_path / "experiments" / "fast", 8, 2, speed=rows)
    made(tmp_path / "experiments" / "old", 1)
    assert table.main([str(tmp_path / "experiments"), "--json"]) == 0
    fast, old = json.loads(capsys.readouterr().out)
    wanted = {"device_hours": 6.0, "samples_per_second": 20.0, "tokens_per_second": 180.0, "mfu": 0.25}
    assert {name: fast[name] for name in wanted} == wanted and "mfu" not in old
    assert table.main([str(tmp_path / "experiments")]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].endswith("device_hours  samples_per_second  tokens_per_second   mfu")
    row = next(line.split() for line in shown.splitlines() if line.startswith("fast"))
    assert row[-4:] == ["6", "20", "180", "0.25"]
