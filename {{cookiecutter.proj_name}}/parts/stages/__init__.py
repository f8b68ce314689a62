"""Stages of a run: settings that hold until a position or a plateau of the validation. docs/parts/stages.md."""
