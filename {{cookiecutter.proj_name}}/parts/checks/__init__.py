"""Warnings of probable mistakes: in data, labels and losses, in how data are read, and of a loss that diverges."""
