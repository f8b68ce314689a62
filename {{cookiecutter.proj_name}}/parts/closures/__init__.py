"""Optimizers that compute the loss several times in a step, such as LBFGS."""
