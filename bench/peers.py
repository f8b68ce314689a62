"""Time per step of the rendered project's trainer and of four other ones, against a bare PyTorch loop.

The same model, optimizer, batches and loss as in bench/loop.py, on which this builds. Segments of all of them alternate
within one process; each ratio is the median over segments of its time by that of the bare loop beside it. Ours has all
that is on by default (log lines, TensorBoard, checks of the losses, signals); the others log nothing and save nothing.
Aim: not behind Fabric. Reached: 1.119 of the bare loop's time, Fabric 1.094, Ignite 1.041.
Needs them in the same environment, which the project's own does not have:

    pip install pytorch-ignite lightning accelerate
    python bench/peers.py [--segments N] [--steps N]
"""

import argparse
import logging
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loop
import torch
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 10**6


class Turns:
    """Runs a training loop in a thread of its own, a segment at a time: it calls `step` before each of its steps."""

    def __init__(self, train: Callable[["Turns"], None], segment: int) -> None:
        self._segment, self._number = segment, segment
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._started = self._seconds = 0.0
        threading.Thread(target=train, args=(self,), daemon=True).start()

    def step(self) -> None:
        if self._number == self._segment:
            self._seconds = time.perf_counter() - self._started
            self._end.release()
            self._begin.acquire()
            self._number, self._started = 0, time.perf_counter()
        self._number += 1

    def __next__(self) -> float:
        """Seconds per step of the next segment."""
        self._end.acquire()  # of the one before
        self._begin.release()
        self._end.acquire()
        self._end.release()
        return self._seconds / self._segment


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Return what each of them trains."""
    torch.manual_seed(0)
    model = loop.Mlp()
    data: Any = loop.Points(Path(), "train")
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=loop.BATCH, shuffle=True)


def ignite(turns: Turns) -> None:
    """Ignite's supervised trainer."""
    from ignite.engine import create_supervised_trainer

    def batch_of(batch: Any, device: Any, non_blocking: bool) -> Any:
        turns.step()
        return batch["image"], batch["label"]

    model, optimizer, loader = parts()
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), prepare_batch=batch_of)
    trainer.run(loader, max_epochs=EPOCHS)


def fabric(turns: Turns) -> None:
    """Lightning's Fabric, with a loop of one's own."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    criterion = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for batch in loader:
            turns.step()
            optimizer.zero_grad()
            loss = criterion(model(batch["image"]), batch["label"])
            fabric.backward(loss)
            optimizer.step()


def accelerate(turns: Turns) -> None:
    """Accelerate, with a loop of one's own."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    criterion = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for batch in loader:
            turns.step()
            optimizer.zero_grad()
            loss = criterion(model(batch["image"]), batch["label"])
            accelerator.backward(loss)
            optimizer.step()


def lightning(turns: Turns) -> None:
    """Lightning's trainer, without its log, bar and checkpoints."""
    from lightning import LightningModule, Trainer

    model, optimizer, loader = parts()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = model, nn.CrossEntropyLoss()

        def training_step(self, batch: Any, _: int) -> Any:
            turns.step()
            return self.criterion(self.model(batch["image"]), batch["label"])

        def configure_optimizers(self) -> Any:
            return optimizer

    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=1, **off).fit(Module(), loader)


PEERS = (ignite, fabric, accelerate, lightning)


def alternate(steps: int) -> Iterator[list[float]]:
    """Seconds per step of a segment of the bare loop, then of each of the others."""
    runs: list[Any] = [loop.bare_loop(steps), *(Turns(train, steps) for train in PEERS)]
    while True:
        yield [next(run) for run in runs]


def main() -> None:
    """Measure, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps per segment")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    loop.SAMPLES = (options.segments + 3) * options.steps * loop.BATCH
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        others = alternate(options.steps)
        next(others)  # imports, first steps
        stream = loop.train_alternating(Path(name), options.segments, options.steps, others)
    rows = [[ours, *each] for ours, each in zip(stream.trainer_times, stream.other_times, strict=True)]
    print(f"{len(rows)} segments of {options.steps} steps, torch {torch.__version__}, 1 thread; us per step, ratio")
    for name, times in zip(("ours", "bare", *(peer.__name__ for peer in PEERS)), zip(*rows, strict=True), strict=True):
        ratios = sorted(one / row[1] for one, row in zip(times, rows, strict=True))
        low, middle, high = (ratios[len(ratios) * part // 4] for part in (1, 2, 3))
        print(f"{name:<10} {statistics.median(times) * 1e6:7.1f}  {middle:.3f}  (half of them {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    sys.modules["loop"] = loop
    main()
