"""The meters: losses collected without waiting, and where the time goes."""

import math
from typing import Any

import pytest
import torch

from common.monitor.meter import Clock, Meter, peak_memory
from common.progress import Position


def losses(total: float, **parts: float) -> dict[str, torch.Tensor]:
    """As `LossFactory` gives them: part of a graph."""
    made = {name: torch.tensor(value, requires_grad=True) * 1 for name, value in parts.items()}
    return {"loss": torch.tensor(total, requires_grad=True) * 1, **made}


def alone(window: int = 20) -> Meter:
    """Of a single process."""
    return Meter(window, lambda found: [found])


def test_the_meter_reads_raw_and_smooth(tmp_path):
    """The last step to the last digit, and the mean over a window of samples."""
    meter = alone(2)
    for step, (value, samples) in enumerate([(9.0, 64), (1.0, 30), (4.0, 10)]):
        meter.add(Position(step), losses(value, a=value / 2), samples)
    reading = meter.read()
    assert reading.raw == {"loss": 4.0, "a": 2.0}
    assert list(reading.raw) == ["loss", "a"]
    assert reading.smooth == pytest.approx({"loss": (30 + 40) / 40, "a": (15 + 20) / 40})
    assert meter.read() == reading


def test_micro_batches_of_a_step_are_one_value():
    """Weighted by their samples, since the last one may be smaller."""
    meter = alone()
    meter.add(Position(), losses(1.0, a=1.0), 3)
    meter.add(Position(), losses(5.0, a=5.0), 1)
    assert meter.read().raw == {"loss": 2.0, "a": 2.0}


def test_adding_touches_nothing_on_the_device():
    """No kernel runs and no graph is kept between two readings."""
    made = losses(1.0, a=1.0)
    meter = alone()
    with torch.profiler.profile() as profile:
        meter.add(Position(), made, 4)
    assert {event.key for event in profile.key_averages()} <= {"aten::detach", "detach"}
    ((_, kept, _),) = meter._pending
    assert not any(value.requires_grad for value in kept.values())


def test_all_losses_come_in_one_transfer(monkeypatch):
    """However many steps and losses there are."""
    meter = alone()
    for step in range(10):
        meter.add(Position(step), losses(1.0, a=1.0, b=2.0), 4)
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
    """The first one, not the one where it was looked for; a part may be bad while the sum is not."""
    meter = alone()
    for step in range(5):
        meter.add(Position(step), losses(1.0, a=bad if step in (2, 3) else 1.0), 4)
    assert meter.first_bad_step() == 3
    meter.add(Position(5), losses(1.0, a=1.0), 4)
    assert meter.first_bad_step() == 3


def test_ranks_are_added_up_by_samples():
    """By step and name, in one exchange; a rank without samples changes nothing, all see a bad one."""
    mine = [(1.0, 30), (3.0, 10), (math.nan, 0), (1.0, 4)]
    theirs = [(5.0, 10), (3.0, 30), (2.0, 8), (math.nan, 4)]
    sums: list[Any] = []

    def feed(values: list[tuple[float, int]], name: str, gather: Any) -> Meter:
        meter = Meter(window=1, gather=gather)
        for step, (value, samples) in enumerate(values):
            meter.add(Position(step), losses(value, **{name: value}), samples)
        return meter

    def keep(mine: Any) -> list[Any]:
        sums.append(mine)
        return [mine]

    feed(theirs[:3], "a", keep).first_bad_step()
    meter = feed(mine[:3], "a", lambda mine: [mine, *sums])
    assert meter.read().raw == {"loss": 2.0, "a": 2.0}
    feed(theirs[:1], "a", keep).first_bad_step()
    meter = feed(mine[:1], "b", lambda mine: [mine, sums[1]])
    assert meter.first_bad_step() is None
    assert meter._recent[1, "loss"] == [80.0, 40] and meter._recent[1, "b"] == [30.0, 30]
    feed(theirs, "a", keep).first_bad_step()
    meter = feed(mine, "a", lambda mine: [mine, sums[2]])
    assert meter.first_bad_step() == 4
    feed([(math.nan, 4)], "b", keep).first_bad_step()  # of a name that is unknown here
    meter = feed([(1.0, 4), (math.nan, 4)], "a", lambda mine: [mine, sums[3]])
    assert meter.first_bad_step() == 1


def test_losses_do_not_pile_up():
    """Without a log line for a long time they are read now and then."""
    meter = alone()
    for step in range(1, 2502):
        meter.add(Position(step), losses(float(step), a=1.0), 1)
    assert len(meter._pending) < 1000
    assert meter.read().raw["loss"] == 2501.0


class FakeTime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("common.monitor.meter.perf_counter", lambda: self.now)

    def steps(self, clock: Clock, count: int, *, wait: float, work: float) -> None:
        for _ in range(count):
            self.now += wait
            clock.batch_ready()
            self.now += work
            clock.step_done(64)


def test_the_clock_tells_step_time_waiting_and_rest(monkeypatch):
    """Validation counts for the remaining time only, the first step for nothing."""
    time = FakeTime(monkeypatch)
    clock = Clock()
    time.steps(clock, 1, wait=50.0, work=50.0)  # workers start, kernels are compiled
    time.steps(clock, 10, wait=0.1, work=0.3)
    timing = clock.read(steps_left=100)
    assert (timing.step, timing.data, timing.rate) == pytest.approx((0.4, 0.25, 160.0))
    assert timing.eta == pytest.approx(40.0)
    time.now += 6.0
    clock.reset()
    time.steps(clock, 10, wait=0.1, work=0.3)
    timing = clock.read(steps_left=100)
    assert (timing.step, timing.data) == pytest.approx((0.4, 0.25))
    assert timing.eta == pytest.approx(100 * 14 / 20)
    assert clock.read(None).eta is None


def test_memory_is_this_process_own():
    """Peak memory on the CPU is what the process had at most."""
    assert 2**20 < peak_memory(torch.device("cpu")) < 2**40
