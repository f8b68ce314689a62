"""Learning rates of any composition of warm-up, schedule and end, against formulas of their own."""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.optim import SGD, lr_scheduler

from common.optim.schedule import LrSchedulerConfig, Schedule
from common.progress import Interval
from library.schedules.plateau_schedule import Plateau

BASE = 0.5
ENDS = ("linear", "cosine", "poly")  # that reach min_factor at the end, and stay there


def optimizer_of(rate: float = BASE) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)


def cosine_between(start: float, end: float, share: Fraction | float) -> float:
    return start + (end - start) * math.sin(math.pi * float(share) / 2) ** 2


@dataclass(frozen=True)
class Case:
    """A composed schedule, with all lengths in steps."""

    kind: str
    warmup: int
    start: float
    total: int
    drops: tuple[int, ...]
    floor: float
    tmax: int | None
    gamma: float
    power: float

    @property
    def end(self) -> int:
        """Return the step at which a schedule with an end has fallen."""
        return self.tmax or self.total

    def build(self) -> Schedule:
        args: dict[str, Any] = {}
        if self.kind == "poly":
            args = {"power": self.power}
        if self.kind in ("multistep", "exponential"):
            args["lr_steps"] = [f"{step}step" for step in self.drops]
            args["lr_gamma"] = self.gamma
        config = LrSchedulerConfig(
            type=self.kind,
            warmup=f"{self.warmup}step",
            warmup_factor=self.start,
            min_factor=self.floor,
            tmax=None if self.tmax is None else f"{self.tmax}step",
            args=args,
        )
        assert not list(config.problems())
        return Schedule(config, optimizer_of(), self.total, None)

    def expected(self, step: int) -> float:
        """Return the documented factor at `step`, from the lengths in steps of the whole run."""
        if step < self.warmup:
            top = self.expected(self.warmup)
            return top * float(self.start + (1 - self.start) * Fraction(step + 1, self.warmup + 1))
        left = max(Fraction(0), Fraction(self.end - step, self.end - self.warmup))
        if self.kind == "linear":
            return self.floor * float(1 - left) + float(left)
        if self.kind == "cosine":
            return cosine_between(self.floor, 1.0, left)
        if self.kind == "poly":
            return self.floor + (1 - self.floor) * float(left) ** self.power
        if self.kind == "multistep":
            return max(self.floor, math.prod(self.gamma for drop in self.drops if drop <= step))
        if self.kind == "exponential":
            return max(
                self.floor, math.exp(math.log(self.gamma) * (step - self.warmup) / (self.drops[0] - self.warmup))
            )
        return 1.0


KINDS = ("constant", *ENDS, "multistep", "exponential")
SHARES = st.sampled_from((0.0, 0.01, 0.25, 0.5, 0.9, 1.0))


@st.composite
def cases(draw: Any, kinds: tuple[str, ...] = KINDS) -> Case:
    total = draw(st.integers(1, 60))
    warmup = draw(st.integers(0, total - 1))
    kind = draw(st.sampled_from(kinds))
    drops = draw(st.lists(st.integers(1 + (kind == "exponential") * warmup, 70), min_size=1, max_size=4, unique=True))
    tmax = draw(st.none() | st.integers(warmup + 1, 80))
    gamma, power = draw(st.sampled_from((0.1, 0.5, 0.9, 1.0))), draw(st.sampled_from((0.5, 0.9, 1.0, 2.0)))
    return Case(kind, warmup, draw(SHARES), total, tuple(drops), draw(SHARES), tmax, gamma, power)


@given(cases())
@example(Case("constant", 0, 0.0, 1, (50,), 0.0, None, 0.1, 0.9))
def test_every_step_has_the_documented_factor(case: Case) -> None:
    """At every step of the run and beyond it, the factor is that of a formula of the test's own."""
    schedule = case.build()
    for step in range(max(case.total, case.end) + 3):
        assert schedule.factor(step) == pytest.approx(case.expected(step), rel=1e-9, abs=1e-12), step


@given(cases())
def test_a_rate_keeps_to_its_bounds_and_joins(case: Case) -> None:
    """After the warm-up a factor is in min_factor..1; before, it rises to it in equal steps from above 0."""
    schedule = case.build()
    factors = [schedule.factor(step) for step in range(max(case.total, case.end) + 3)]
    warm, rest = factors[: case.warmup], factors[case.warmup :]
    assert all(case.floor - 1e-12 <= factor <= 1.0 for factor in rest)
    if case.warmup:
        stride = rest[0] * (1 - case.start) / (case.warmup + 1)
        assert warm[0] == pytest.approx(rest[0] * case.start + stride)
        assert all(after - before == pytest.approx(stride, abs=1e-12) for before, after in pairwise([*warm, rest[0]]))
        assert warm[0] > 0 or rest[0] == 0
    if case.kind in ENDS:
        assert rest[0] == 1.0
        assert factors[case.end :] == pytest.approx([case.floor] * len(factors[case.end :]))
    assert all(after <= before + 1e-12 for before, after in pairwise(rest))


@given(cases((*KINDS, "onecycle")), st.integers(0, 60))
def test_a_resume_at_any_step_has_the_same_rates(case: Case, cut: int) -> None:
    """A schedule that was never stepped, on an optimizer with another rate, goes on with the same bits."""

    def values(schedule: Schedule, steps: range) -> list[float]:
        made = []
        for step in steps:
            schedule.step(step)
            made.append(schedule._optimizer.param_groups[0]["lr"])
        return made

    uncut, resumed = case.build(), case.build()
    whole = values(uncut, range(case.total))
    cut %= case.total
    resumed._optimizer.param_groups[0]["lr"] = 77.0
    resumed.load_state_dict(uncut.state_dict())
    assert values(resumed, range(cut, case.total)) == whole[cut:]


@given(
    st.integers(2, 80), st.floats(0.05, 0.95), st.floats(1.0, 50.0), st.floats(1.0, 1e5), st.sampled_from((0.0, 0.001))
)
@example(20, 0.05, 25.0, 1e4, 0.0)
def test_onecycle_is_that_of_torch(steps: int, share: float, div: float, final: float, floor: float) -> None:
    """For any length and shape, the factors are those of OneCycleLR, but never below min_factor at the end."""
    config = LrSchedulerConfig(
        type="onecycle",
        min_factor=floor,
        args={"pct_start": share, "div_factor": div, "final_div_factor": final},
    )
    schedule = Schedule(config, optimizer_of(), steps, None)
    assert all(0 <= schedule.factor(step) <= 1.0 + 1e-12 for step in range(steps + 2))
    assume(steps * share - 1 > 1e-9)  # torch divides by 0 where the rise has no length
    optimizer = optimizer_of()
    lowest = max(floor, 1 / div / final)
    reference = lr_scheduler.OneCycleLR(
        optimizer, BASE, steps, pct_start=share, div_factor=div, final_div_factor=1 / div / lowest, cycle_momentum=False
    )
    for step in range(steps):
        assert schedule.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"] / BASE, abs=1e-9), step
        optimizer.step()
        if step < steps - 1:
            reference.step()


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=30),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from((0.0, 0.125, 0.5)),
    st.sampled_from(("min", "max")),
    st.sampled_from((0.0, 0.0625)),
    st.integers(0, 30),
)
def test_a_plateau_counts_as_documented_and_resumes(
    values: list[int], patience: int, cooldown: int, threshold: float, mode: str, floor: float, cut: int
) -> None:
    """It drops after more than `patience` validations in a row without progress, also when it is resumed anywhere."""

    def plateau() -> Plateau:
        return Plateau(floor, mode, patience, threshold, lr_gamma=0.5, cooldown=cooldown)

    schedule, expected = plateau(), 1.0
    best: int | None = None
    since = pause = 0  # validations without progress, and those that do not count
    for number, value in enumerate(values):
        if number == cut:
            saved, schedule = dict(schedule.state), plateau()
            schedule.state = saved
        schedule.after_validation(float(value))
        sign = 1 if mode == "max" else -1
        progress = best is None or Fraction(sign * (value - best)) > Fraction(threshold) * abs(best)
        best = value if progress else best
        since = 0 if progress or pause else since + 1
        pause = max(0, pause - 1)
        if since > patience:
            expected, since, pause = max(floor, expected / 2), 0, cooldown
        assert schedule(number) == expected


@given(st.fractions(Fraction(1, 100), 50, max_denominator=100), st.integers(1, 1000))
def test_a_length_in_epochs_is_the_nearest_number_of_steps(amount: Fraction, steps_per_epoch: int) -> None:
    """`2.5epoch` is the nearest whole number of steps, at least one, however it is written."""
    exact = amount * steps_per_epoch
    for text in (f"{amount}epoch", f"{amount} epochs", str(amount)):
        steps = Interval.parse(text, "epoch").in_steps(steps_per_epoch)
        assert steps >= 1
        assert abs(steps - exact) <= Fraction(1, 2) or (steps == 1 and exact < 1)
