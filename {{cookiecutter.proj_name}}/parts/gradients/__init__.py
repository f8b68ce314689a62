"""Weights and gradients in the log, with `debug.debug_mode`."""
