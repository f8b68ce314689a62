"""Programs to run by hand, `python -m tools.<name>`. Nothing imports them."""
