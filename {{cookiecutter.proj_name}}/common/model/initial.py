"""The key `init_weights`: weight initialization by parameter name, with the functions of `torch.nn.init`, or yours."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch import nn

from common.base.errors import UserError
from common.config import ABSENT, Problem
from common.config.names import match_names
from common.config.registry import INIT_REGISTRY

for _name in [name for name in vars(nn.init) if name.endswith("_") and name[0] != "_"]:
    INIT_REGISTRY.register(_name.removesuffix("_"))(getattr(nn.init, _name))


class WeightRules:
    """Checks rules such as `[{match: "*.weight", type: kaiming_normal, nonlinearity: relu}]`."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        for number, rule in enumerate(value if isinstance(value, list) else ()):
            if not isinstance(rule.get("match"), (str, list)):
                hint = 'must be names of parameters, as in "*.weight", or a list of them'
                yield Problem(f"{key}[{number}].match", rule.get("match", ABSENT), hint)
            yield from INIT_REGISTRY.check(rule, f"{key}[{number}]", ignore=("match",))


def fill_weights(model: nn.Module, rules: Sequence[Mapping[str, Any]]) -> None:
    """Fill the parameters that each rule names, one rule after the other, from torch's global random stream.

    Raises `UserError` if a pattern matches nothing, or a function does not fit a parameter.
    """
    parameters = dict(model.named_parameters())
    for number, rule in enumerate(rules):
        where, patterns = f"init_weights[{number}]", rule["match"]
        names = match_names([patterns] if isinstance(patterns, str) else patterns, list(parameters), f"{where}.match")
        for name in names:
            try:
                with torch.no_grad():
                    INIT_REGISTRY.build(rule, ignore=("match",), tensor=parameters[name])
            except (TypeError, ValueError, KeyError, RuntimeError) as error:
                said = f"{where}: {rule['type']} does not fit {name} {tuple(parameters[name].shape)}"
                raise UserError(f"{said}: {error}; narrow match") from error
        logger.info("{}: {} fills {} of {} parameters", where, rule["type"], len(names), len(parameters))
