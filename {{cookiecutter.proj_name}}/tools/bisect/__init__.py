"""The key or the commit that makes two runs differ, by short runs."""
