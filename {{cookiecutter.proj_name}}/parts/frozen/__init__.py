"""Tensors that training never changes are left out of checkpoints, as with LoRA: docs/parts/frozen.md."""
