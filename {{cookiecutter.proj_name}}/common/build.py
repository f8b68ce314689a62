"""Builds the objects of a run from the config, for training and for evaluation."""

from collections.abc import Iterable, Mapping
from typing import Any

from loguru import logger
from torch import nn
from torch.nn.parameter import is_lazy

from common.base.errors import UserError, error_context
from common.base.parts import part, required
from common.base.text import label
from common.checkpoint.weights import init_weights
from common.config.problem import join_names
from common.config.registry import MODEL_REGISTRY, TASK_REGISTRY
from common.data.loader import EvaluationLoader, TrainStream
from common.data.order import EpochOrder, EpochPlan
from common.data.sections import build_dataset, sets_of
from common.data.view import is_map_style, kind_of
from common.distributed import Rank, check_same
from common.distributed.seed import mix, set_seed
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.model import check_patterns
from common.model.strategy import check_tensor_names
from common.optim.precision import build_precision
from common.run.paths import PROJECT, data_dir
from common.settings import RunConfig
from common.task import Built, Task


def build_run(
    config: RunConfig,
    rank: Rank,
    *,
    first_weights: bool = True,
) -> Built:
    """Build everything that the config names. The seed determines the initial weights, which are the same on all ranks.

    The order of the samples is made in common/data/order.py: `EpochOrder` calls the function that `loader.order` names,
    and `EpochPlan.global_batches` cuts it into steps.

    Without `first_weights`, a checkpoint will replace them, and the file of `init_from` is not needed.

    Raises `UserError` if an object cannot be built, or if the classes of the datasets differ.
    """
    stream = build_stream(config, rank)
    task = build_task(config, rank, first_weights=first_weights)
    built = Built(
        task=task,
        precision=build_precision(config.precision, rank.device),
        stream=stream,
        val=build_evaluation(config, "val", rank),
        evaluation=build_evaluation(config, "eval", rank),
    )
    datasets = {"train": stream.dataset}
    for loader in (*built.val, *built.evaluation):
        datasets[label(loader.split, loader.name)] = loader.dataset
    built.task.classes = check_classes(config.model, datasets)
    return built


def build_task(
    config: RunConfig,
    rank: Rank,
    *,
    first_weights: bool,
) -> Task:
    """Build the task with its model, losses and metrics; with `first_weights`, load the weights of `init_from`."""
    set_seed(config.dist.random_seed)
    model: nn.Module = MODEL_REGISTRY.build(config.model)
    if first_weights:
        init_weights(model, config.init_from, PROJECT, rank)
    task: Task = TASK_REGISTRY.build(
        config.task,
        model=model,
        loss=LossFactory(config.loss),
        metric=MetricFactory(config.metric),
    )
    if hasattr(task, "inspect"):
        required("inspect", "around", "inspect of the task")
    check_tensor_names(task)
    check_no_lazy(task)
    check_patterns(task, config.prepare)
    stages = part("stages", "stages")
    if stages is not None:
        stages.check_stages(config, task)
    return task


def check_no_lazy(task: Task) -> None:
    """Refuse weights without a shape: an optimizer, a summary and other processes need it before the first batch."""
    tensors = dict(task.named_parameters()) | dict(task.named_buffers())
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise UserError(
            f"{join_names(lazy, 5)}: lazy modules have no shape yet; give the number of input features, as in "
            "nn.Linear, or call the model once on a batch of zeros at the end of its __init__"
        )


def build_stream(config: RunConfig, rank: Rank) -> TrainStream:
    """Build the training data, divided among the ranks, and shuffled unless it can only be read in order."""
    dataset = seeded_dataset(config, "train", "", config.dataset.train, rank)
    if not is_map_style(dataset):
        asks = f"dataset.train: {kind_of(dataset)} has no __len__ and __getitem__, so it"
        streams = required("streams", "stream", asks)
        return streams.IterableStream(dataset, config, rank)
    accumulate = config.optim.accumulate
    if config.dist.is_fixed:
        accumulate = required("reduction", "tree", "dist.reduction").leaves_here(accumulate, rank)
    order = EpochOrder(config.loader.order, dataset, config.dist.random_seed)
    check_same({"its first samples": order(0)[:8].tolist()}, rank, "has a different loader.order than rank 0")
    plan = EpochPlan(
        order.size,
        batch_size=config.batch_size,
        accumulate=accumulate,
        rank=rank.rank,
        world_size=rank.world_size,
        drop_last=config.loader.drop_last,
        in_blocks=config.dist.is_fixed,
    )
    return TrainStream(
        dataset,
        order,
        plan,
        config.loader,
        worker=config.num_workers,
        device=rank.device,
    )


def build_evaluation(config: RunConfig, split: str, rank: Rank) -> list[EvaluationLoader]:
    """Build the datasets of a split, unshuffled; every sample is evaluated once over all ranks.

    Raises `UserError` if one cannot be indexed.
    """
    loaders = []
    for name, section in sets_of(getattr(config.dataset, split)).items():
        dataset = seeded_dataset(config, split, name, section, rank)
        if not is_map_style(dataset):
            where = f"dataset.{label(split, name)}"
            raise UserError(f"{where}: {kind_of(dataset)} needs __len__ and __getitem__ to be evaluated on")
        loader = EvaluationLoader(
            dataset,
            config.loader,
            batch_size=section.get("eval_batch_size", config.batch_size),
            worker=config.num_workers,
            rank=rank,
            seed=config.dist.random_seed,
            split=split,
            name=name,
        )
        loaders.append(loader)
    return loaders


def seeded_dataset(config: RunConfig, split: str, name: str, section: Mapping[str, Any], rank: Rank) -> Any:
    """Build a dataset; its name is "" if it is the only one of its split.

    The constructors of all sets draw the same random numbers, so each splits the data in the same way (`random_split`).

    Raises `UserError` if its size differs between ranks, for example because one copy is incomplete.
    """
    full_name = label(split, name)
    set_seed(mix(config.dist.random_seed, 1))
    folder = data_dir(config.dir.data_dir, PROJECT)
    with error_context(f"in building dataset.{full_name}"):
        dataset = build_dataset(section, split, folder, limit=config.debug.max_samples)
    size = None
    if is_map_style(dataset):
        size = len(dataset)
    check_same({f"samples of dataset.{full_name}": size}, rank, "sees different data than rank 0")
    return dataset


def check_classes(
    model: Mapping[str, Any],
    data: Mapping[str, Any],
) -> tuple[str, ...]:
    """Compare the `classes` of the datasets with each other and with the model. Returns the class names, if any.

    Warns of a model with more classes than the data: nothing fails, but they are never right.

    Args:
        model: the section of the model.
        data: datasets by the name of their split.

    Raises:
        UserError: the splits differ (label 1 would not mean the same in training and validation), or the model has too
            few classes.
    """
    first = ""
    names: tuple[str, ...] = ()
    for split, dataset in data.items():
        given = getattr(dataset, "classes", None)
        classes: tuple[str, ...] = ()
        if isinstance(given, Iterable):  # else their number
            classes = tuple(map(str, given))
        if not names:
            first = split
            names = classes
        if classes not in ((), names):
            raise UserError(
                f"dataset.{split} has the classes {', '.join(classes)}, but dataset.{first} has {', '.join(names)}; "
                "every split needs the same class folders; some may be empty"
            )
    for key in ("classes", "num_classes"):
        count = model.get(key)
        if not names or not isinstance(count, int) or count == len(names):
            continue
        text = f"model.{key} is {count}, but dataset.{first} has {len(names)} classes ({join_names(names)})"
        if len(names) > count:
            raise UserError(f"{text}; use --model.{key} {len(names)}")
        logger.warning("{}; if that is not intended, use --model.{} {}", text, key, len(names))
    return names
