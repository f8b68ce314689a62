"""Models too large for one GPU, sharded over several (FSDP): docs/parts/fsdp.md."""
