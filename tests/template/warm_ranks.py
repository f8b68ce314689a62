"""Loaded last where the ranks of a test are forked from: what each would look up anew is kept."""

from warm import remember_packages, remember_versions

remember_packages()
remember_versions()
