"""The section profile of the config."""

import json

import pytest

from tests.conftest import Runs


def test_a_run_writes_a_trace_of_some_steps_and_trains_on(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    folder = runs.train("--profile.steps", "2", "--profile.wait", "3")
    trace = json.loads((folder / "profile.json").read_text())["traceEvents"]
    names = {event.get("name") for event in trace}
    assert {name for name in names if str(name).startswith("ProfilerStep")} == {"ProfilerStep#3", "ProfilerStep#4"}
    assert (
        sum(
            event.get("name") == "aten::mkldnn_convolution" or event.get("name") == "aten::convolution"
            for event in trace
        )
        >= 6
    )
    assert "aten::convolution_backward" in (folder / "train.log").read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert "Self CPU" in capfd.readouterr().err
    assert not (runs.train(name="off") / "profile.json").exists()
