"""A moving average (EMA) of the weights, which is evaluated in their place: docs/parts/ema.md."""
