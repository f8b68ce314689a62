"""Numbers, texts and pictures that a task shows at each log line: docs/parts/inspect.md."""
