"""`transforms` in the section of a dataset: steps that each sample goes through: docs/parts/transforms.md."""
