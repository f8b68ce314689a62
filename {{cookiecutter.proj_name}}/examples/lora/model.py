"""A model with adapters. What peft freezes is not trained, and `checkpoint.frozen: false` keeps it out of the files."""

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model

from common.config.registry import MODEL_REGISTRY


def lora_model(base: dict[str, Any], settings: dict[str, Any]) -> PeftModel:
    """Build a model with adapters.

    Args:
        base: section of the model, as in `model`.
        settings: of `peft.LoraConfig`.
    """
    model: PeftModel = get_peft_model(MODEL_REGISTRY.build(base), LoraConfig(**settings))
    return model
