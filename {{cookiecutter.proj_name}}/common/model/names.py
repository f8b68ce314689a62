"""Modules chosen by patterns over their full dotted names."""

from collections.abc import Sequence

from torch import nn

from common.base.errors import UserError
from common.config.names import matched


def matched_modules(model: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """The modules below `model` that any of `patterns` matches, except those inside another match.

    Raises:
        UserError: a pattern matches nothing, or a list of modules, which is never called itself.
    """
    modules = dict(list(model.named_modules())[1:])  # the first is the model itself
    chosen: dict[str, nn.Module] = {}
    for name in matched(patterns, list(modules), key):
        if any(name.startswith(f"{above}.") for above in chosen):
            continue
        if type(modules[name]).forward is nn.Module.forward:
            kind = type(modules[name]).__name__
            raise UserError(f"{key}: {name} is a {kind}, which is never called; name what is in it: {name}.*")
        chosen[name] = modules[name]
    return chosen
