"""The warning of a loss that diverges: on curves as they occur, real and made up, never; on diverging ones, always."""

import math
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from loguru import logger
from torch import nn

from parts.checks.divergence import DivergenceWatch
from tests.conftest import Runs, metrics

Curve = Iterator[float]
rng = np.random.default_rng


def warning(curve: Curve) -> str:
    """Return the warning that a curve gives, "" for none."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(line), level="WARNING", format="{message}")
    try:
        watch = DivergenceWatch()
        for step, loss in enumerate(curve, 1):
            watch(step, loss)
    finally:
        logger.remove(sink)
    assert len(lines) < 2
    return "".join(lines)


def train(
    steps: int,
    lr: Callable[[int], float],
    *,
    kind: str = "SGD",
    batch: int = 32,
    classes: Callable[[int], int] = lambda step: 10,
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy,
    seed: int = 0,
    hidden: bool = True,
    **options: float,
) -> Curve:
    """Train a small network on the digits; `classes`: the data of a step are the first of them."""
    torch.manual_seed(seed)
    digits = np.load("data/digits.npz")
    names = {name: digits[name] for name in digits.files}
    image, label = (torch.tensor(names[name]) for name in sorted(names, key=lambda name: -names[name].ndim)[:2])
    image = image.flatten(1).float() / 16
    model = nn.Sequential(nn.Linear(image.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    model = model if hidden else nn.Sequential(nn.Linear(image.shape[1], 10))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1.0, **options)
    known, largest = torch.tensor([]), 0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        if classes(step) != largest:
            largest = classes(step)
            known = (label < largest).nonzero().flatten()
        chosen = known[torch.randint(len(known), (batch,))]
        value = loss(model(image[chosen]), label[chosen].long())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        yield float(value.detach())


def squared(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - label).square().mean()


def constant(lr: float) -> Callable[[int], float]:
    return lambda step: lr


def warm_up(lr: float, steps: int) -> Callable[[int], float]:
    return lambda step: lr * min(1.0, step / steps)


def restarts(lr: float, length: int) -> Callable[[int], float]:
    return lambda step: lr * 0.5 * (1 + math.cos(math.pi * (step % length) / length))


def gan(steps: int, part: int, seed: int) -> Curve:
    """Train a generator of a normal law against a critic; the loss of the generator (0), or that of both (1).

    That of the critic alone rises to its chance level as the generator learns; in a run it is an update of its own.
    """
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    critic = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
    first, second = (torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.5, 0.99)) for model in (generator, critic))
    for _ in range(steps):
        fake, real = generator(torch.randn(64, 4)), torch.randn(64, 1) * 0.5 + 3
        softplus = nn.functional.softplus
        its_loss = softplus(critic(fake.detach())).mean() + softplus(-critic(real)).mean()
        second.zero_grad()
        its_loss.backward()
        second.step()
        loss = softplus(-critic(fake)).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        yield float(loss.detach() + part * its_loss.detach())


def falling(steps: int, start: float, end: float, noise: float, seed: int, power: float = 0.5) -> np.ndarray:
    """Return a loss that falls with a power of the step; noise in proportion to it."""
    level = end + (start - end) * np.arange(1, steps + 1) ** -power
    return np.asarray(level * np.exp(noise * rng(seed).standard_normal(steps)))


def language_model(seed: int) -> Curve:
    """A long run with a warm-up, noise, and every 400 steps a spike from which it recovers within 60."""
    curve = falling(6000, 10.8, 2.8, 0.03, seed, 0.4)
    for at in range(700 + 31 * seed, 6000, 400):
        length = min(60, 6000 - at)
        curve[at : at + length] += 4 * np.exp(-np.arange(length) / 15)
    return iter(curve)


def heavy_tailed(seed: int) -> Curve:
    """Batches of one sample: the loss of each is anything from a hundredth to a hundred times the usual."""
    return iter(falling(4000, 2.3, 0.4, 0.0, seed) * np.exp(1.5 * rng(seed).standard_normal(4000)))


def oscillating(period: int, depth: float, seed: int) -> Curve:
    """A sum of losses of two that play against each other."""
    steps = np.arange(5000)
    noise = 0.15 * rng(seed).standard_normal(5000)
    return iter(1.4 + depth * np.sin(2 * np.pi * steps / period + seed) + noise)


def curriculum(seed: int) -> Curve:
    """Every 800 steps harder data, on which the loss is at first higher than it ever was; slowly learned."""
    parts = [falling(800, 2.0 + level, 0.3 + 0.2 * level, 0.1, seed + level, 0.3) for level in range(5)]
    return iter(np.concatenate(parts))


def other_data(seed: int) -> Curve:
    """From step 800 on, other data, of which the model knows less than nothing, and which it learns slowly."""
    later = np.maximum(7 * np.exp(-np.arange(2200) / 150), 0.8) * np.exp(0.05 * rng(seed).standard_normal(2200))
    return iter(np.concatenate([falling(800, 2.3, 0.3, 0.1, seed), later]))


def annealed(seed: int) -> Curve:
    """A variational bound: from step 500 to 1500 the weight of a second term grows from 0 to 1."""
    steps = np.arange(4000)
    weight = np.clip((steps - 500) / 1000, 0, 1)
    return iter(falling(4000, 540, 95, 0.04, seed) + weight * 30)


def queue(seed: int) -> Curve:
    """A contrastive loss, as its queue fills: it rises for 500 steps from 6 to 9, and then falls to 7."""
    steps = np.arange(4000)
    curve = 6 + 3 * np.clip(steps / 500, 0, 1) - 2 * np.clip((steps - 800) / 3000, 0, 1)
    return iter(curve + 0.1 * rng(seed).standard_normal(4000))


def from_nothing(seed: int) -> Curve:
    """The distance to a teacher that began with the same weights."""
    steps = np.arange(3000)
    return iter(0.05 * (1 - np.exp(-steps / 200)) * np.exp(0.2 * rng(seed).standard_normal(3000)))


def likelihood(seed: int) -> Curve:
    """A density's loss, which has no zero: from 4 to -12."""
    return iter(falling(4000, 16, 0.1, 0.0, seed) - 12 + 0.8 * rng(seed).standard_normal(4000))


def flat(seed: int) -> Curve:
    """One that learns nothing."""
    return iter(2.303 + 0.05 * rng(seed).standard_normal(3000))


def overfitted(seed: int) -> Curve:
    """It has learned everything, and single batches still cost something."""
    curve = falling(6000, 2.3, 1e-4, 0.3, seed, 1.2)
    spikes = rng(seed).random(6000) < 0.03
    return iter(np.where(spikes, curve + 0.9, curve))


NORMAL: dict[str, Callable[[], Curve]] = {
    "real: SGD": lambda: train(800, constant(0.1)),
    "real: Adam": lambda: train(800, constant(3e-3), kind="Adam"),
    "real: one sample": lambda: train(1500, constant(0.01), batch=1),
    "real: warm-up": lambda: train(900, warm_up(0.5, 300), momentum=0.5),
    "real: restarts": lambda: train(1200, restarts(0.3, 300), momentum=0.5),
    "real: restarts of Adam": lambda: train(1200, restarts(2e-2, 300), kind="Adam"),
    "real: a rate at the edge": lambda: train(1200, constant(0.8)),
    "real: curriculum": lambda: train(1300, constant(0.1), classes=lambda step: 2 + step // 150),
    "real: curriculum, suddenly": lambda: train(1300, constant(0.1), classes=lambda step: 2 if step < 600 else 10),
    "real: regression": lambda: train(1000, constant(1e-3), loss=squared, momentum=0.9),
    "real: labels that are learned by heart": lambda: train(1500, constant(5e-3), kind="Adam", batch=8, seed=3),
    "real: generator": lambda: gan(1200, 0, 0),
    "real: both": lambda: gan(1200, 1, 1),
    **{f"language model {seed}": lambda seed=seed: language_model(seed) for seed in range(3)},  # type: ignore[misc]
    **{f"heavy tails {seed}": lambda seed=seed: heavy_tailed(seed) for seed in range(3)},  # type: ignore[misc]
    **{f"oscillation {n}": lambda n=n: oscillating(n, n / 1000, n) for n in (100, 400, 900)},  # type: ignore[misc]
    "curriculum": lambda: curriculum(0),
    "other data": lambda: other_data(0),
    "annealed": lambda: annealed(0),
    "queue": lambda: queue(0),
    "from nothing": lambda: from_nothing(0),
    "likelihood": lambda: likelihood(0),
    "flat": lambda: flat(0),
    "overfitted": lambda: overfitted(0),
}


def broken(curve: Curve, at: int, after: Callable[[int, float], float]) -> Curve:
    """Change a curve from step `at` on: `after` has the steps since, and the loss."""
    for step, loss in enumerate(curve):
        yield loss if step < at else after(step - at, loss)


def noisy(level: float, noise: float = 0.05) -> Callable[[int, float], float]:
    draw = rng(9)
    return lambda step, loss: level * math.exp(noise * float(draw.standard_normal()))


DIVERGING: dict[str, tuple[int, Callable[[], Curve]]] = {
    # From the start, or at a step; each must be named within 1,100 steps after it.
    "real: rate too high": (0, lambda: train(120, constant(0.1), loss=squared, hidden=False)),
    "real: rate raised": (600, lambda: train(1200, lambda step: 0.1 if step < 600 else 6.0)),
    "real: Adam without measure": (500, lambda: train(1000, lambda step: 3e-3 if step < 500 else 0.5, kind="Adam")),
    "real: growing rate": (300, lambda: train(900, lambda step: 0.05 * 1.01 ** max(0, step - 300), momentum=0.9)),
    "grows without end": (2000, lambda: broken(language_model(0), 2000, lambda n, loss: loss * 1.01 ** min(n, 900))),
    "creeps": (2000, lambda: broken(language_model(1), 2000, lambda n, loss: loss + 0.02 * n)),
    "dead at chance": (3000, lambda: broken(iter(falling(6000, 2.3, 0.2, 0.2, 5)), 3000, noisy(2.303, 0.01))),
    "jumps at once": (0, lambda: broken(iter(falling(600, 2.3, 0.2, 0.1, 6)), 8, noisy(80, 0.5))),
    "explodes, and stays high": (
        1000,
        lambda: broken(
            iter(falling(2200, 2.3, 0.4, 0.1, 8)), 1000, lambda n, loss: 7e4 if n < 20 else noisy(70, 0.02)(n, 0)
        ),
    ),
    "late": (20_000, lambda: broken(iter(falling(22_000, 7, 1.5, 0.05, 7)), 20_000, noisy(6.5))),
    "heavy tails": (1000, lambda: broken(heavy_tailed(4), 1000, lambda n, loss: loss * min(1 + n / 20, 60))),
}


def test_there_are_as_many_as_promised() -> None:
    assert (len(NORMAL), len(DIVERGING)) == (30, 11)


@pytest.mark.parametrize("name", NORMAL)
def test_a_normal_curve_is_no_divergence(name: str) -> None:
    assert warning(NORMAL[name]()) == ""


@pytest.mark.parametrize("name", DIVERGING)
def test_a_diverging_curve_is(name: str) -> None:
    at, curve = DIVERGING[name]
    text = warning(curve())
    match = re.search(r"from (\S+) at step (\d+) it has risen to (\S+) at step (\d+), and does not fall; try", text)
    assert match, text
    low, before, high, step = map(float, match.groups())
    assert low < high and before < step and at < step <= at + 1100


class Growing(nn.Module):
    """Cross entropy, which from a step on is multiplied with more and more."""

    calls: torch.Tensor

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.training:
            self.calls += 1
        factor = 1.05 ** (self.calls - self.after).clamp(0, 60)
        return factor * nn.functional.cross_entropy(output["logits"], batch["label"])


DOOR = ["--progress.epoch", "40", "--progress.epoch_val", "-1", "--progress.epoch_save_latest", "-1"]


def test_a_run_warns(runs: Runs) -> None:
    """In one sentence, with the level at the run's start also after a resume, which is where the loss was low last."""
    words = [*DOOR, "--loss", "{$REPLACE: true, ce: {type: engine.monitor.test_divergence.Growing, after: 70}}"]
    runs.train(*words, "--progress.max_steps", "75")
    folder = runs.train(*words, "--resume", "auto", "--progress.max_steps", "180")
    lines = [line for line in (folder / "train.log").read_text().splitlines() if "the loss diverges" in line]
    assert len(lines) == 1 and "WARNING" in lines[0]
    low = float(re.findall(r"from (\S+) at step", lines[0])[0])
    assert low < metrics(folder, "train")[0]["values"]["loss"]


def test_a_stage_begins_anew(runs: Runs) -> None:
    """Its losses may be of another size, here a hundred times, and need not fall."""
    stages = "[{until: 60step}, {loss: {CrossEntropyLoss: {weight: 100}}, optim: {lr: 1e-9}}]"
    folder = runs.train(*DOOR, "--stages", stages, "--progress.max_steps", "160")
    losses = [entry["values"]["loss"] for entry in metrics(folder, "train")]
    assert max(losses[32:]) > 20 * min(losses[:30])
    assert "diverges" not in (folder / "train.log").read_text()
