"""A trace of some training steps by torch.profiler."""
