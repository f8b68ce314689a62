"""Warnings of probable mistakes: in data, labels and losses."""
