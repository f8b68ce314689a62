"""Learning rate schedules against closed forms and against torch's own."""

import math
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from common.base.errors import UserError
from common.config import ConfigError, resolve, section
from common.config.registry import SCHEDULE_REGISTRY
from common.optim import OptimConfig
from common.optim.schedule import Schedule

TOTAL, EPOCH = 60, 6  # optimizer steps in the run and in an epoch
BASE = 0.5


@section
class Root:
    """The section under test."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """how weights change"""


def an_optimizer(cls: Callable[..., Optimizer] = SGD, **arguments: Any) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [torch.nn.Parameter(torch.zeros(1))]}]
    groups[1]["lr"] = 2 * BASE  # type: ignore[assignment]
    return cls(groups, lr=BASE, **arguments)


@pytest.fixture
def build(tmp_path: Path):
    def make(
        text: str,
        total: int | None = TOTAL,
        epoch: int | None = EPOCH,
        optimizer: Optimizer | None = None,
        mode: str = "min",
    ) -> tuple[Schedule, Optimizer]:
        path = tmp_path / "config.yaml"
        path.write_text(f"optim: {{lr_scheduler: {text}}}\n")
        config = resolve(Root, [path]).config.optim.lr_scheduler
        optimizer = optimizer or an_optimizer()
        return Schedule(config, optimizer, total, epoch, mode=mode), optimizer

    return make


def rates(built: tuple[Schedule, Optimizer], steps: range = range(TOTAL)) -> list[float]:
    schedule, optimizer = built
    found = []
    for step in steps:
        schedule.step(step)
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(2 * first), "every group keeps its own base rate"
        found.append(first)
    return found


def torch_rates(make: Callable[[Optimizer], Any], steps: int = TOTAL) -> list[float]:
    optimizer = an_optimizer(momentum=0.9)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


SAME_AS_TORCH = {
    "{type: constant}": lambda o: lr_scheduler.ConstantLR(o, factor=1.0),
    "{type: linear, min_factor: 0.1}": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=TOTAL),
    "{type: linear, tmax: 5}": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=30),
    "{type: cosine, min_factor: 0.2}": lambda o: lr_scheduler.LambdaLR(
        o, lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * t / TOTAL)) / 2
    ),
    "{type: CosineAnnealingLR}": lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL),
    "{type: poly, args: {power: 2}}": lambda o: lr_scheduler.PolynomialLR(o, TOTAL, power=2.0),
    "{type: poly, tmax: 30step}": lambda o: lr_scheduler.PolynomialLR(o, 30, power=0.9),
    "{type: multistep, args: {lr_steps: [2, 5], lr_gamma: 0.3}}": lambda o: lr_scheduler.MultiStepLR(o, [12, 30], 0.3),
    "{type: multistep, args: {lr_steps: [7step, 0.5epoch]}}": lambda o: lr_scheduler.MultiStepLR(o, [3, 7], 0.1),
    "{type: exponential, args: {lr_steps: [5], lr_gamma: 0.1}}": lambda o: lr_scheduler.ExponentialLR(
        o, 0.1 ** (1 / 30)
    ),
    "{type: onecycle}": lambda o: lr_scheduler.OneCycleLR(o, [BASE, 2 * BASE], total_steps=TOTAL, cycle_momentum=False),
    "{type: onecycle, args: {pct_start: 0.55, div_factor: 5, final_div_factor: 10}}": lambda o: lr_scheduler.OneCycleLR(
        o, [BASE, 2 * BASE], total_steps=TOTAL, pct_start=0.55, div_factor=5, final_div_factor=10, cycle_momentum=False
    ),
}
# Here every milestone lies behind the longest warm-up of the tests below.
PURE = [text.replace("[7step, 0.5epoch]", "[17step, 2.5epoch]") for text in SAME_AS_TORCH]


@pytest.mark.parametrize("text", SAME_AS_TORCH)
def test_the_rates_are_those_of_torch(build, text: str) -> None:
    """Every step of every kind, old names too, against torch's scheduler."""
    # The last step of OneCycleLR allows no further `step`.
    steps = TOTAL - 1 if "onecycle" in text else TOTAL
    expected = torch_rates(SAME_AS_TORCH[text], steps)
    assert rates(build(text), range(steps)) == pytest.approx(expected)


@pytest.mark.parametrize("text", PURE)
@pytest.mark.parametrize("warmup", ["0", "2", "7step"])
def test_the_rate_is_a_pure_function_of_the_step(build, text: str, warmup: str) -> None:
    """In any order, after a jump, from a fresh schedule, with a loaded optimizer: the same rates."""
    text = f"{text[:-1]}, warmup: {warmup}}}"
    forward = rates(build(text))
    assert rates(build(text), range(TOTAL - 1, -1, -1)) == forward[::-1]
    for start in (1, 12, 30, 59):  # 12 and 30 are milestones, where others decayed twice
        schedule, optimizer = build(text)
        trained = build(text)
        rates(trained, range(start))
        schedule.load_state_dict(trained[0].state_dict())
        optimizer.load_state_dict(trained[1].state_dict())
        assert rates((schedule, optimizer), range(start, TOTAL)) == forward[start:]


def test_a_rate_loaded_into_the_optimizer_does_not_stay(build) -> None:
    """The schedule decides, whatever rate a checkpoint of another configuration put there meanwhile."""
    schedule, optimizer = build("{type: constant}")
    schedule.step(0)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 77.0
    optimizer.load_state_dict(state)
    schedule.step(1)
    assert optimizer.param_groups[0]["lr"] == BASE


@pytest.mark.parametrize("text", PURE)
def test_warm_up_rises_from_above_zero_inside_the_total(build, text: str) -> None:
    """Linear per step, never 0, reaching the schedule's start; the end does not move."""
    found = rates(build(f"{text[:-1]}, warmup: 9step}}"))
    top = found[9]
    assert found[:9] == pytest.approx([top * (i + 1) / 10 for i in range(9)])
    started = rates(build(f"{text[:-1]}, warmup: 9step, warmup_factor: 0.5}}"))
    assert started[:9] == pytest.approx([top * (0.5 + 0.5 * (i + 1) / 10) for i in range(9)])
    assert started[9:] == found[9:]
    if "tmax" not in text and ("linear" in text or "poly" in text):
        assert found[9] == pytest.approx(BASE)
        assert found[-1] < found[-2] < found[-3]


def test_milestones_and_ends_count_from_the_start_of_the_run(build) -> None:
    """A warm-up shifts no milestone; cosine ends at its total with the floor, and stays there."""
    found = rates(build("{type: multistep, args: {lr_steps: [2, 5], lr_gamma: 0.5}, warmup: 1}"))
    assert found[6:] == [BASE] * 6 + [BASE / 2] * 18 + [BASE / 4] * 30
    inside = rates(build("{type: multistep, args: {lr_steps: [2step], lr_gamma: 0.5}, warmup: 4step}"))
    assert inside[:5] == pytest.approx([BASE / 2 * i / 5 for i in range(1, 6)])
    cosine = rates(build("{type: cosine, warmup: 1, tmax: 4, min_factor: 0.25}"))
    assert cosine[15] == pytest.approx(BASE * (0.25 + 0.75 / 2))  # half way between step 6 and step 24
    assert cosine[24:] == [BASE * 0.25] * 36
    exponential = rates(
        build("{type: exponential, args: {lr_steps: [5], lr_gamma: 0.01}, warmup: 1, min_factor: 0.001}")
    )
    assert exponential[30] == pytest.approx(BASE * 0.01)
    assert exponential[18] == pytest.approx(BASE * 0.1)
    assert min(exponential[6:]) == pytest.approx(BASE * 0.001)


def test_the_floor_is_a_factor_and_never_raises_the_rate(build) -> None:
    """Whatever the rate, the floor lies below it."""
    drops = "args: {lr_steps: [1, 2, 3], lr_gamma: 0.1}"
    kinds = ["linear", "cosine", "poly", "onecycle", f"multistep, {drops}", f"exponential, {drops}"]
    for kind in kinds:
        found = rates(build(f"{{type: {kind}, min_factor: 0.3}}"), range(200))
        assert max(found) <= BASE
        assert found[-1] == pytest.approx(0.3 * BASE)


# --- plateau ------------------------------------------------------------------------------------------------------

VALUES = [1.0, 0.9, 0.95, 0.91, 0.90, 0.8, 0.8, 0.85, math.nan, 0.9, 0.9, 0.9, 0.7, 0.71, 0.72, 0.73, 0.74, 0.75]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("cooldown", [0, 2])
def test_plateau_follows_the_rules_of_torch(build, mode: str, cooldown: int) -> None:
    """Rate after every validation as in ReduceLROnPlateau, the warm-up in front."""
    reference = an_optimizer()
    torchs = lr_scheduler.ReduceLROnPlateau(reference, mode, factor=0.5, patience=1, cooldown=cooldown)
    options = f"type: plateau, args: {{patience: 1, cooldown: {cooldown}, lr_gamma: 0.5}}"
    mine, warmed = build(f"{{{options}}}", mode=mode), build(f"{{{options}, warmup: 4step}}", mode=mode)
    seen = []
    for step, value in enumerate(VALUES):
        [rate], [risen] = rates(mine, range(step, step + 1)), rates(warmed, range(step, step + 1))
        assert rate == pytest.approx(reference.param_groups[0]["lr"])
        assert risen == pytest.approx(rate * min(1.0, (step + 1) / 5))
        seen.append(rate)
        for schedule in (mine[0], warmed[0]):
            schedule.after_validation(value)
        torchs.step(value)
    assert len(set(seen)) > 2


def test_plateau_counts_below_zero_too(build) -> None:
    """A negative loss that stands still is no progress; torch's scheduler takes it for some."""
    schedule, optimizer = build("{type: plateau, args: {patience: 1}}")
    for _ in range(3):
        schedule.after_validation(-1.0)
    schedule.step(0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * BASE)


def test_plateau_has_a_floor(build) -> None:
    """`min_factor` ends the drops."""
    schedule, optimizer = build("{type: plateau, min_factor: 0.2, args: {patience: 0, lr_gamma: 0.5}}")
    for _ in range(8):
        schedule.after_validation(1.0)
    schedule.step(0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * BASE)
    build("{type: cosine}")[0].after_validation(1.0)  # a function of the step ignores it


def only_plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple):
        return all(only_plain(one) for one in (value.values() if type(value) is dict else value))
    return type(value) in (bool, int, float, str, type(None))


@pytest.mark.parametrize("stop", [3, 8, 30])
def test_plateau_resumes_exactly(build, tmp_path: Path, stop: int) -> None:
    """State of plain values through a safe load, then the rates of the uncut run."""
    text = "{type: plateau, args: {patience: 0}, warmup: 5step}"

    def run(built: tuple[Schedule, Optimizer], steps: range) -> list[Any]:
        seen = []
        for step in steps:
            built[0].step(step)
            seen.append([group["lr"] for group in built[1].param_groups])
            built[0].after_validation([1.0, 2.0, 0.5][step % 3])
        return seen

    uncut = run(build(text, optimizer=an_optimizer(AdamW)), range(50))
    first, second = build(text, optimizer=an_optimizer(AdamW)), build(text, optimizer=an_optimizer(AdamW))
    assert run(first, range(stop)) == uncut[:stop]
    assert only_plain(first[0].state_dict())
    torch.save({"schedule": first[0].state_dict(), "optimizer": first[1].state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second[0].load_state_dict(state["schedule"])
    second[1].load_state_dict(state["optimizer"])
    assert run(second, range(stop, 50)) == uncut[stop:]


@SCHEDULE_REGISTRY.register()
def halving(step: int, min_factor: float, every: int = 10) -> float:
    """A schedule of one's own."""
    return max(min_factor, 0.5 ** (step // every))


def test_a_schedule_of_ones_own(build) -> None:
    """A function of the step, by name or path, with keys of the section and arguments of its own."""
    expected = torch_rates(lambda o: lr_scheduler.StepLR(o, 7, 0.5))
    assert rates(build("{type: halving, args: {every: 7}}")) == pytest.approx(expected)
    assert rates(build(f"{{type: {__name__}:halving, args: {{every: 7}}}}")) == pytest.approx(expected)
    warmed = rates(build("{type: halving, args: {every: 7}, warmup: 4step}"))
    assert warmed[:4] == pytest.approx([BASE * i / 5 for i in (1, 2, 3, 4)])
    assert warmed[4:] == pytest.approx(expected[:-4])
    assert rates(build("{type: halving, min_factor: 0.25}"))[-1] == 0.25 * BASE


def test_arguments_of_a_schedule_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    """The last one counts; another type has other arguments, so those of the file must go."""
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("optim: {lr_scheduler: {type: poly, args: {power: 2}}}\n")
    mine.write_text("$BASE: base.yaml\noptim: {lr_scheduler: {args: {power: 3}}}\n")

    def arguments(*words: str) -> dict[str, Any]:
        return resolve(Root, [mine], words).config.optim.lr_scheduler.args

    assert arguments() == {"power": 3}
    assert arguments("--optim.lr_scheduler.args.power", "5") == {"power": 5}
    wsd = ["--optim.lr_scheduler.type", "wsd"]
    with pytest.raises(ConfigError, match=r"args.power = 3 .*mine.yaml:2\)\n +is not an argument of wsd"):
        arguments(*wsd)
    assert arguments(*wsd, "--optim.lr_scheduler.args", "{$REPLACE: true, decay: 0.3}") == {"decay": 0.3}


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{type: cosin}", ["lr_scheduler.type", "did you mean cosine"]),
        ("{type: StepLR}", ["lr_scheduler.type", "known: ", "multistep"]),
        ("{type: torch.optim.lr_scheduler.StepLr}", ["lr_scheduler.type", "did you mean StepLR"]),
        (
            "{type: torch.optim.lr_scheduler.StepLR}",
            ["lr_scheduler.type", "custom/NAME_schedule.py", "--list schedules"],
        ),
        ("{type: torch.optim.Adam}", ["lr_scheduler.type", "function of the step"]),
        ("{type: halving, args: {evry: 3}}", ["args", "did you mean every"]),
        ("{type: halving, args: {min_factor: 0.1}}", ["args.min_factor", "another key"]),
        ("{type: cosine, args: {T_max: 3}}", ["args", "T_max", "cosine"]),
        ("{warmup: 5eopch}", ["lr_scheduler.warmup", "5eopch"]),
        ("{tmax: 0}", ["lr_scheduler.tmax", "null"]),
        ("{type: multistep, args: {lr_steps: []}}", ["lr_scheduler.args.lr_steps", "at least 1"]),
        ("{type: multistep, args: {lr_steps: [5, 3x]}}", ["lr_scheduler.args.lr_steps[1]", "3x"]),
        ("{type: multistep, args: {lr_steps: [5, -3]}}", ["lr_scheduler.args.lr_steps", "above 0"]),
        ("{min_factor: 1.5}", ["lr_scheduler.min_factor"]),
        ("{T_max: 5}", ["T_max = 5", "did you mean optim.lr_scheduler.tmax"]),
        ("{warmup: -3}", ["lr_scheduler.warmup = -3", "must not be negative"]),
        ("{warmup: -3step}", ["lr_scheduler.warmup", "must not be negative"]),
        ("{type: onecycle, args: {pct_strat: 0.2}}", ["pct_strat", "falling_schedule.py", "did you mean pct_start"]),
        ("{type: onecycle, args: {pct_start: 2}}", ["pct_start = 2", "less than 1", "an argument of onecycle"]),
        ("{type: poly, args: {power: 0}}", ["power = 0", "greater than 0"]),
        ("{typ: cosine}", ["did you mean optim.lr_scheduler.type"]),
    ],
)
def test_mistakes_are_refused_before_anything_is_built(build, text: str, says: list[str]) -> None:
    """Unknown kinds, arguments and lengths are refused with the nearest right name."""
    with pytest.raises(ConfigError) as raised:
        build(text)
    for words in says:
        assert words in str(raised.value)


@pytest.mark.parametrize("kind", ["linear", "cosine", "poly", "onecycle"])
def test_a_schedule_that_ends_needs_to_know_when(build, kind: str) -> None:
    """Without a length of the run, `tmax` in steps is asked for, and then enough."""
    with pytest.raises(UserError, match=rf"{kind}.*lr_scheduler\.tmax in steps"):
        build(f"{{type: {kind}}}", total=None)
    with pytest.raises(UserError, match=r"no length.*\n.*lr_scheduler\.tmax 5"):
        build(f"{{type: {kind}, tmax: 5}}", total=None, epoch=None)
    known = rates(build(f"{{type: {kind}, tmax: 60step}}", total=None, epoch=None))
    assert known == rates(build(f"{{type: {kind}}}"))


@pytest.mark.parametrize(
    "kind", ["constant", "multistep, args: {lr_steps: [5step]}", "exponential, args: {lr_steps: [5step]}", "plateau"]
)
def test_the_others_run_without_end(build, kind: str) -> None:
    """An endless run over data without length, as long as lengths are in steps."""
    found = rates(build(f"{{type: {kind}, warmup: 3step}}", total=None, epoch=None))
    assert found[3] > 0
    with pytest.raises(UserError, match=r"in steps.*\n.*lr_scheduler\.warmup 3"):
        build(f"{{type: {kind}, warmup: 3}}", total=None, epoch=None)


def test_a_warm_up_longer_than_the_schedule_is_refused(build) -> None:
    """The warm-up counts inside the total, so it must leave something of it."""
    for text in ("{type: cosine, warmup: 10}", "{type: exponential, args: {lr_steps: [2]}, warmup: 2}"):
        with pytest.raises(UserError, match="shorten the warm-up"):
            build(text)


def test_another_schedules_state_has_no_effect(build) -> None:
    """Plateau begins to count after cosine; a pure function of the step takes over from anything."""
    cosine, plateau = build("{type: cosine}")[0], build("{type: plateau}")[0]
    before = plateau.state_dict()
    plateau.load_state_dict(cosine.state_dict())
    assert plateau.state_dict() == before
    cosine.load_state_dict(plateau.state_dict())
    assert cosine.state_dict() == {}


def test_a_schedule_that_counts_epochs(build) -> None:
    """It gets the steps of one, unless `args` has them; None for data without length."""
    seen = []

    @SCHEDULE_REGISTRY.register("by_epoch")
    def by_epoch(step: int, steps_per_epoch: int | None, gamma: float = 0.5) -> float:
        seen.append(steps_per_epoch)
        return gamma ** (step // (steps_per_epoch or 1))

    try:
        assert rates(build("{type: by_epoch, args: {gamma: 0.1}}"))[:: EPOCH // 2] == pytest.approx(
            [BASE * 0.1 ** (at // 2) for at in range(2 * TOTAL // EPOCH)]
        )
        build("{type: by_epoch, args: {steps_per_epoch: 7}}")
        build("{type: by_epoch}", epoch=None)
        assert set(seen[:-2]) == {EPOCH} and seen[-2:] == [7, None]
    finally:
        SCHEDULE_REGISTRY._entries.pop("by_epoch")
