"""The first failure of any process ends all processes, and its reason is shown."""
