"""How many examples a property is tried on: a few, the same ones every day; with PROPERTIES=many, 800 new ones.

A failure prints the smallest example. Keep it above the test as `@example(...)`, so that it is always tried.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "few",
    derandomize=True,
    database=None,
    deadline=None,  # the machines of CI are slow at times
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("many", settings.get_profile("few"), derandomize=False, print_blob=True, max_examples=800)
settings.load_profile(os.environ.get("PROPERTIES", "few"))
