"""What a config measures, and whether lower or higher values of it are better."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from common.base.errors import UserError
from common.config import ABSENT, ConfigError, Problem
from common.config.registry import METRIC_REGISTRY
from common.config.schema import suggestion
from common.evaluation.best import BestConfig, Mode
from common.evaluation.metric import Better


def measured_losses(sections: Mapping[str, Any] | None) -> list[str]:
    """The sum and the losses that are part of it; losses with the weight 0 are not computed."""
    sections = sections or {}
    off = [name for name, section in sections.items() if isinstance(section, Mapping) and section.get("weight") == 0]
    return ["loss", *(name for name in sections if name not in off)]


def check_names(metrics: Iterable[str], losses: Iterable[str]) -> Iterator[Problem]:
    """A problem for each metric with the name of a loss, whose value it would replace in every record."""
    for metric in metrics:
        if metric in ("loss", *losses):
            rule = "is the name of a loss too, and only one of the two values could be kept"
            hint = "call one of them something else and name its type, as in my_name: {type: ...}"
            yield Problem(f"metric.{metric}", ABSENT, rule, hint)


def metric_directions(sections: Mapping[str, Any]) -> dict[str, Better]:
    """`higher_is_better` of each metric's class; None if the class is not found, which `MetricSections` reports."""
    found: dict[str, Better] = dict.fromkeys(sections)
    for name, section in sections.items():
        kind = section.get("type", name) if isinstance(section, Mapping) else name
        with suppress(UserError):
            found[name] = getattr(METRIC_REGISTRY.get(str(kind)), "higher_is_better", None)
    return found


def find_mode(config: BestConfig, better: Mapping[str, Better], sets: Iterable[str]) -> Mode:
    """Whether lower or higher values of the metric are better.

    Args:
        better: whether higher is better, for each loss and metric by name; each may have parts, `name.part`.
        sets: names of the validation sets, whose values are called `set.value`; "" for a single one.

    Raises:
        ConfigError: the config has no such metric, its direction is unknown and `mode` auto, or `mode` contradicts it.
    """
    name, says = config.metric, _find(config.metric, better, [each for each in sets if each])
    if says is None and config.mode == "auto":
        rule = f"cannot tell whether higher values of {name} are better"
        hint = "set best.mode to min or max, or higher_is_better in the class of the metric"
        raise ConfigError([Problem("best.mode", config.mode, rule, hint)])
    if says is not None and config.mode == ("min" if says else "max"):
        rule = f"would keep the worst model, since {'higher' if says else 'lower'} values of {name} are better"
        raise ConfigError([Problem("best.mode", config.mode, rule, "leave best.mode out, or set it to auto")])
    return config.mode if config.mode != "auto" else "max" if says else "min"


def _find(metric: str, better: Mapping[str, Better], named: Sequence[str]) -> bool | None:
    measured = {f"{name}.{value}": says for name in named for value, says in better.items()} if named else better
    value = max((value for value in measured if f"{metric}.".startswith(f"{value}.")), key=len, default=None)
    if value is not None:
        says = measured[value]
        return says.get(metric.removeprefix(f"{value}.")) if isinstance(says, Mapping) else says
    hint = suggestion(metric, list(measured), "there is")
    if named and metric.partition(".")[0] in better:
        hint = f"dataset.val has sets by name, so name the set too, as in {named[0]}.{metric}"
    rule = "is neither a loss with a weight other than 0 nor a metric of this config"
    raise ConfigError([Problem("best.metric", metric, rule, hint)])
