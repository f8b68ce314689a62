"""Optional parts of the engine, a folder each: docs/parts/. Delete the folder, and the part is gone."""
