"""TFLOP/s, and MFU: their share of what the device can do at most."""
