"""Models of transformers."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def causal_model(model_type: str, settings: dict[str, Any], folder: str | None = None) -> PreTrainedModel:
    """Build a language model.

    Args:
        model_type: a family of models, as in `AutoConfig.for_model`.
        settings: of its config class.
        folder: where `save_pretrained` has put config and weights, instead of the two.
    """
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
