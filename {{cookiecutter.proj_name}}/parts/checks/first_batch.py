"""Warnings before training, from the first batch of each evaluation set."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.base.text import label
from common.config.problem import join_names
from common.data.loader import EvaluationLoader
from common.distributed.seed import set_seed
from common.evaluation.loss import Losses
from common.monitor.meter import to_floats
from common.task import Task
from common.trainer import Trainer

_SAMPLES = 32  # for the question whether the loss is a mean over samples
_MEAN = (
    "Return the mean of one value per sample, or write the task's `count`: see docs/evaluation.md, Losses. If it "
    "compares the samples of a batch, as contrastive losses do, set compares_samples = True in its class"
)
_ROUNDING = 2e-5  # relative; of a sum of floats in another order, with a margin


class FirstBatch:
    """Warns of probable mistakes in data, labels or losses. Called with the first batch of every evaluation set."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.task = trainer.task
        # Not where a forward pass needs all processes, or a batch of another size would be compiled.
        self._is_to_divide = not trainer.strategy.lockstep_forward and not trainer.config.prepare.compile.enabled
        for name in ("updates", "update", "measure"):
            if getattr(type(self.task), name) is not getattr(Task, name):
                self._is_to_divide = False

    def __call__(self, loader: EvaluationLoader, batch: Any, output: Any, losses: Losses) -> None:
        """Check a batch that is on the device, in evaluation mode and without gradients."""
        name = label(loader.split, loader.name)
        refuse_no_scalar(losses)
        data = {}
        if isinstance(batch, Mapping):
            data = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        warn_of_range(name, data.get("image"))
        logits = None
        if isinstance(output, Mapping):
            logits = output.get("logits")
        if isinstance(logits, Tensor) and logits.ndim in (2, 4):  # of images, or of pixels
            self.trainer.classes = logits.shape[1]
            warn_of_probabilities(name, logits)
        warn_of_nan(name, loader.keys[0][1], data, to_floats([losses])[0])
        if loader.split == "val" and self._is_to_divide and "loss" in losses:
            self._is_to_divide = False
            with suppress(Exception):  # what cannot be divided is not checked
                self._divide(loader)

    def _divide(self, loader: EvaluationLoader) -> None:
        """Warn if the loss of some samples is not the mean of the losses of pairs of them, weighted by `count`.

        Also if the forward pass changes parameters. The samples are spread over the set, since the first ones may be of
        one class.
        """
        size = min(_SAMPLES, loader.batch_size, loader.size)
        chosen = list(range(0, loader.size, loader.size // size))[:size]
        task = self.task
        loaded = loader.read_once(chosen)
        before = {name: (weight.data_ptr(), weight._version) for name, weight in task.named_parameters()}
        batch, output, measured = self.trainer.evaluator.measure(loaded)
        changed = []
        for name, weight in task.named_parameters():
            if before[name] != (weight.data_ptr(), weight._version):  # replaced, or changed in place
                changed.append(name)
        if changed:
            logger.warning(
                "the forward pass changes {} in evaluation too, so training depends on how often it is evaluated and "
                "resumed: change them in the task's after_step, or only if self.training",
                join_names(changed, 3),
            )
        for part in (task, *(term.function for term in task.loss.terms)):
            if size < 6 or getattr(part, "compares_samples", False):
                return
        found: list[Tensor] = []
        map_tensors((batch, output), found.append)
        if any(tensor.ndim and len(tensor) != size for tensor in found):
            return

        def some(values: Any, part: slice) -> Any:
            """Cut what has one entry per sample."""
            if type(values) is dict:
                return {key: some(value, part) for key, value in values.items()}
            if isinstance(values, list) and len(values) == size and not isinstance(values[0], Tensor):
                return values[part]
            return map_tensors(values, lambda item: item[part] if item.ndim > 0 and len(item) == size else item)

        def losses_of(part: slice, seed: int = 0) -> dict[str, float]:
            set_seed(seed)  # for losses that draw numbers
            with self.trainer.strategy.precision.autocast():
                values = task.losses(some(output, part), some(batch, part))
            return to_floats([values])[0]

        whole = losses_of(slice(size))
        if whole != losses_of(slice(size), seed=1):
            return
        # Small parts: the losses of an untrained model are nearly alike, so weights show most where few are averaged.
        sums = dict.fromkeys(whole, 0.0)
        total = 0
        for start in range(0, size, 2):
            part = slice(start, start + 2)
            count = task.count(some(loaded, part))
            if count is None:
                count = len(range(size)[part])
            if count:
                total += int(count)
                for name, value in losses_of(part).items():
                    sums[name] += int(count) * value
        rounding = max(_ROUNDING, 16 * torch.finfo(measured["loss"].dtype).eps)
        wrong = []
        for name, value in whole.items():
            if not abs(value - sums[name] / total) <= rounding * abs(value):
                wrong.append(name)
        if "loss" not in wrong:
            return
        name = min(wrong, key=lambda name: name == "loss")  # rather the part that is the cause
        logger.warning(
            "{} is not a mean over samples: {:.6g} for {} samples of {}, but {:.6g} as the mean of batches of two, so "
            "it depends on eval_batch_size, and training on optim.accumulate. {}",
            *(name, whole[name], size, label(loader.split, loader.name), sums[name] / total, _MEAN),
        )


def refuse_no_scalar(losses: Mapping[str, Any]) -> None:
    """Raise `UserError` if a loss is no scalar tensor; its part comes before `loss`, the sum."""
    for name in sorted(losses, key=lambda name: name == "loss"):
        value = losses[name]
        if not isinstance(value, Tensor):
            raise UserError(
                f"the loss {name} is of type {type(value).__name__}; a loss is a tensor without dimensions, the mean "
                "over the samples: return it without .item(), a constant as torch.tensor(1.0)"
            )
        if value.ndim:
            raise UserError(f"the loss {name} has the shape {tuple(value.shape)}; a loss is one number: use .mean()")


def warn_of_range(name: str, image: Tensor | None) -> None:
    """Warn of images with values far outside of 0..1. Normalised ones have negative values too."""
    if image is None or not image.is_floating_point() or image.ndim != 4:
        return
    low, high = torch.stack(image.aminmax()).tolist()
    if (low >= 0 and high > 1.5) or high > 20:
        logger.warning(
            "{}: `image` has values from {:.4g} to {:.4g}, but models and pictures expect 0 to 1; scale them in the "
            "dataset's __getitem__, as in image / 255",
            *(name, low, high),
        )


def warn_of_probabilities(name: str, logits: Tensor) -> None:
    """Warn if `logits` (B, classes, ...) are probabilities: cross entropy applies softmax, so the model must not."""
    sums = logits.float().sum(1)
    if logits.shape[1] > 1 and logits.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=0.01):
        logger.warning(
            "{}: `logits` are probabilities already (each row sums to 1), but cross entropy applies softmax itself: "
            "training would be slow and stop early. Remove the softmax at the end of the model",
            name,
        )


def warn_of_nan(name: str, indices: Sequence[int], data: Mapping[str, Tensor], losses: Mapping[str, float]) -> None:
    """Warn of losses that are not finite before the first step, and of the samples that hold NaN or infinity."""
    bad = [key for key, value in losses.items() if not math.isfinite(value)]
    if not bad:
        return
    causes = []
    for key, value in data.items():
        if value.is_floating_point() and value.ndim and len(value) == len(indices):
            is_bad = ~value.isfinite().reshape(len(value), -1).all(1)
            numbers = [str(index) for index, wrong in zip(indices, is_bad.tolist(), strict=True) if wrong]
            if numbers:
                causes.append(f"`{key}` is not finite in sample {join_names(numbers, 3)}")
    cause = "; ".join(causes) or "its data are finite, so look at the model and the loss"
    logger.warning("{}: {} of the first batch is {} before training: {}", name, bad[-1], losses[bad[-1]], cause)
