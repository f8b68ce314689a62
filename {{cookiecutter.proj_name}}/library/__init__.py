"""Ready-made parts that a config can name: datasets, transforms, orders, metrics, schedules and writers.

Nothing imports them, so each file can be deleted, and edited like your own.
"""
