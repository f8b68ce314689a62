"""Warnings of probable mistakes: in data, labels and losses, and in how data are read."""
