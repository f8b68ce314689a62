"""Pictures of predictions, in TensorBoard and as files: docs/parts/pictures.md."""
