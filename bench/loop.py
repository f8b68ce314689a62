"""Time per step of the rendered project's trainer, all default features on, against a bare PyTorch loop.

The same model (an MLP 32-64-10), optimizer (SGD), batch (64) and loader on both sides; segments of the two alternate
within one process, and the ratio is that of their medians. Run:  python bench/loop.py [--segments N] [--steps N]

Aim: 1.15. Reached on two cores: 1.12 to 1.21, by the hour; a log line takes 0.84 ms (aim 0.3): each step looks at its
loss and gradients, and a log line reads the losses of all processes and goes to three places.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

import torch  # noqa: E402
from common.build import build_run  # noqa: E402
from common.config import Resolved, resolve  # noqa: E402
from common.data.loader import Step, TrainStream  # noqa: E402
from common.progress import Position  # noqa: E402
from common.run_context import managed_run  # noqa: E402
from common.trainer import Trainer  # noqa: E402
from custom.config import Config  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

SAMPLES, FEATURES, CLASSES, BATCH = 6400, 32, 10, 64


class Mlp(nn.Module):
    """32-64-10."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


class Points:
    """Random features with random labels: learning is not the point here."""

    random = False

    def __init__(self, data_dir: Path, mode: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


class Alternating(TrainStream):
    """The trainer's own stream, which hands the machine to the others after each segment and takes the times."""

    def arm(self, segment: int, others: Iterator[Any]) -> None:
        self.segment, self.others = segment, others
        self.trainer_times: list[float] = []
        self.other_times: list[Any] = []

    def epoch(self, at: Position) -> Iterator[Step]:
        start = time.perf_counter()
        for number, step in enumerate(super().epoch(at)):
            if number % self.segment == 0 and number:
                self.trainer_times.append((time.perf_counter() - start) / self.segment)
                self.other_times.append(next(self.others))
                start = time.perf_counter()
            yield step


def bare_loop(segment: int) -> Iterator[float]:
    """Seconds per step of what everybody writes first, a segment at a time."""
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: DataLoader[Any] = DataLoader(Points(Path(), "train"), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    yield from bare_steps(segment, model, optimizer, loader)


def bare_steps(
    segment: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
) -> Iterator[float]:
    """Seconds per step, a segment at a time, for ever."""
    criterion = nn.CrossEntropyLoss()
    batches = iter(loader)
    while True:
        start = time.perf_counter()
        for _ in range(segment):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            optimizer.zero_grad()
            loss = criterion(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
        yield (time.perf_counter() - start) / segment


def build(folder: Path, segments: int, steps: int) -> tuple[Config, Resolved[Config], list[str]]:
    """Build a training config as the command line would give it, with everything that is on by default."""
    words = [
        "--name", "bench", "--dir.runs_dir", str(folder), "--model", "{type: loop.Mlp}",
        "--dataset", "{train: {type: loop.Points}, val: null, eval: null}",
        "--optim.optim_type", "SGD", "--optim.lr", "0.01",
        "--progress.max_steps", str((segments + 1) * steps + 1), "--progress.epoch", "null",
    ]  # fmt: skip
    resolved = resolve(Config, [PROJECT / "configs" / "default.yaml"], words)
    return resolved.config, resolved, words


def main() -> None:
    """Measure, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps per segment")
    parser.add_argument("--profile", action="store_true", help="profile the trainer's Python instead")
    options = parser.parse_args()
    global SAMPLES
    SAMPLES = (options.segments + 2) * options.steps * BATCH  # one epoch: no validation, no checkpoint in between
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        bare = bare_loop(options.steps)
        stream = train_alternating(Path(name), options.segments, options.steps, bare, profile=options.profile)
    ours, theirs = statistics.median(stream.trainer_times), statistics.median(stream.other_times)
    pairs = [a / b for a, b in zip(stream.trainer_times, stream.other_times, strict=True)]
    print(f"{len(pairs)} segments of {options.steps} steps, torch {torch.__version__}, 1 thread")
    print(f"trainer  {ours * 1e6:7.1f} us per step (median)")
    print(f"bare     {theirs * 1e6:7.1f} us per step (median)")
    low, middle = min(pairs), statistics.median(pairs)
    print(f"ratio    {ours / theirs:.3f} of medians; pair by pair min {low:.3f}, median {middle:.3f}")


def train_alternating(
    folder: Path, segments: int, steps: int, others: Iterator[Any], *, profile: bool = False
) -> Alternating:
    """Run the trainer, alternating with what `others` yields the times of."""
    config, resolved, words = build(folder, segments, steps)
    with managed_run(config, resolved, words) as run:
        built = build_run(config, run.rank)
        run.open()
        trainer = Trainer(config, built, run)
        stream = trainer.stream
        stream.__class__ = Alternating
        assert isinstance(stream, Alternating)
        stream.arm(steps, others)
        if profile:
            import cProfile

            cProfile.runctx("trainer.train()", {}, {"trainer": trainer}, sort="cumtime")
        else:
            trainer.train()
    return stream


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["loop"] = sys.modules["__main__"]
    main()
