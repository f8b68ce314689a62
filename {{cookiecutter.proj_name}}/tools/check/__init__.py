"""The guarantees of the engine, tried on the owner's own code: python -m tools.check."""
