"""The model of a trained task as a function of tensors: what the task gives it, and what it returns, by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.base.errors import UserError
from common.build import build_set
from support.trained import Trained

Tensors = dict[str, Tensor]


class Plain(nn.Module):
    """A model whose inputs are given by position, and whose outputs are a tensor or a tuple of tensors."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = tuple(flat(self.model(**dict(zip(self.names, inputs, strict=True)))).values())
        return found if len(found) > 1 else found[0]


@dataclass(frozen=True)
class Model:
    """A model to export: the inputs that the task gives it for some samples, and its outputs, all by name.

    Attributes:
        keys: of each input, the part of a sample that it is; None if the task computes it.
    """

    trained: Trained
    module: nn.Module
    inputs: Tensors
    keys: Mapping[str, str | None]

    @property
    def plain(self) -> Plain:
        return Plain(self.module, list(self.inputs)).eval()

    def outputs(self, inputs: Tensors) -> Tensors:
        """What the model itself computes."""
        with torch.no_grad():
            return flat(self.module(**inputs))

    def replace(self, run: Callable[[Tensors], Tensors]) -> None:
        """From now on, the task computes with `run` in place of its model: inputs by name -> outputs by name."""
        with torch.no_grad():
            example = self.module(**self.inputs)

        def replaced(*given: Tensor, **named: Tensor) -> Any:
            found = run(dict(zip(self.inputs, given, strict=False)) | named)
            found = {name: value.to(self.trained.rank.device) for name, value in found.items()}
            if isinstance(example, Tensor):
                return found["output"]
            return found if isinstance(example, Mapping) else tuple(found.values())

        setattr(self.module, "forward", replaced)  # noqa: B010 - mypy rejects an assignment


def flat(output: Any) -> Tensors:
    """The tensors that a model returned, by name. Raises `UserError` for anything but one, a tuple or a mapping."""
    if isinstance(output, Tensor):
        return {"output": output}
    named = output if isinstance(output, Mapping) else {f"output_{at}": each for at, each in enumerate(output)}
    if not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise UserError("the model returns something other than tensors, or tensors inside of each other's lists")
    return dict(named)


def inputs_of(trained: Trained, batch: Any) -> tuple[Tensors, dict[str, str | None]]:
    """What the task calls its model with for a loaded batch, by the names of the parameters; and the keys of a batch.

    Raises:
        UserError: the task does not call the model itself (but a part of it), or with other things than tensors.
    """
    task, calls = trained.task, list[tuple[Any, Any]]()
    model: nn.Module = task.model
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        task.output(task.prepare_batch(trained.precision.cast_batch(batch), trained.rank.device))
    hook.remove()
    kind = f"{type(model).__name__} of {type(task).__name__}"
    if not calls:
        raise UserError(f"the task never calls the whole {kind}, so there is nothing that could be exported as one")
    found: Tensors = inspect.signature(model.forward).bind(*calls[0][0], **calls[0][1]).arguments
    if other := [name for name, value in found.items() if not isinstance(value, Tensor)]:
        raise UserError(f"{kind} is called with {', '.join(other)}, which are no tensors; only tensors can be exported")
    parts = batch.items() if isinstance(batch, Mapping) else ()
    keys = {name: next((key for key, part in parts if _is_same(part, value)), None) for name, value in found.items()}
    return found, keys


def _is_same(part: Any, value: Tensor) -> bool:
    return isinstance(part, Tensor) and part.shape == value.shape and torch.equal(part.to(value), value)


def read_model(trained: Trained) -> Model:
    """The model, with inputs for eight samples of the run's own data."""
    label, section = trained.section()
    split, _, name = label.partition(".")
    config = replace(trained.config, worker=0)
    loader = build_set(config, split, name, {**section, "eval_batch_size": 8}, trained.rank, trained.seed)
    inputs, keys = inputs_of(trained, next(iter(loader)))
    return Model(trained, trained.task.model, inputs, keys)
