"""Programs to run by hand, `python -m tools.<name>`. Nothing imports them."""

import common  # before PyTorch and others: it says what is missing
