"""Steps with a loss or gradient that is not finite, or a spike, are skipped or undone: docs/parts/bad_steps.md."""
