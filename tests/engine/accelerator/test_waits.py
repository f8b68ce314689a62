"""Where the host waits for the device: exactly here, so that a new `.item()` in the loop fails."""

from collections import Counter
from collections.abc import Callable

import pytest

from engine.conftest import AVERAGED

Waits = Callable[..., dict[str, Counter[str]]]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--optim.accumulate", "2", "--batch_size", "16", *AVERAGED, "--optim.clip_gradients", "1"),
        ("--num_workers", "1", "--precision.mode", "bf16"),
    ],
    ids=["plain", "everything", "workers"],
)
def test_there_is_none_between_two_log_lines(waits: Waits, words: tuple[str, ...]) -> None:
    assert waits(*words)["steps"] == {}


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (("--precision.mode", "fp16"), 1),  # whether the optimizer may step
        (("--optim.bad_steps.action", "skip", "--optim.accumulate", "2", "--batch_size", "16"), 2),  # losses; gradients
        (("--dist.reduction", "fixed", "--dist.deterministic", "strict"), 1),  # which parameters have gradients
    ],
    ids=["fp16", "bad_steps", "fixed"],
)
def test_what_must_be_known_in_each_step_is_waited_for_once(waits: Waits, words: tuple[str, ...], places: int) -> None:
    found = waits(*words)["steps"]
    assert len(found) == places and max(found.values()) <= 10, found


def test_those_of_a_log_line_an_evaluation_and_a_save(waits: Waits) -> None:
    """In a run with five log lines, two validations of a batch each, and two saves."""
    found = waits()
    losses = {"copy to the host  common/finite.py finish": 5}
    read = {"copy to the host  common/monitor/meter.py to_floats": 5, "item  common/monitor/monitor.py train": 5}
    assert found["log"] == losses | read
    checked = "item  common/finite.py are_finite"
    assert found["save"] == {checked: 2, "device.synchronize  common/checkpoint/saver.py _copy_to_host": 2}
    assert found["evaluate"] == {
        "copy to the host  common/finite.py finish": 1,  # the other validation follows a log line
        "copy to the host  common/monitor/meter.py to_floats": 3,
        "item  custom/metric/accuracy_metric.py update": 4,
        "copy to the host  parts/pictures/classification.py class_errors": 6,
        "copy to the host  parts/pictures/gallery.py <lambda>": 96,
    }
