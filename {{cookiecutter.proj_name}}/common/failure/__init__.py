"""The first failure of any process ends all of them, with its reason."""
