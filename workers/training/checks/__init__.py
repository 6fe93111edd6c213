"""Checks before the first step: the conditions of an exact loss, and the gradient of two splits."""
