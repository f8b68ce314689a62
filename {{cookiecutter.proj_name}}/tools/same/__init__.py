"""Two runs, configs or commits of the project, compared to the last bit."""
