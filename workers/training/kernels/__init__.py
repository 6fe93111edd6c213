"""Kernels that are faster than the model's own, attention, and rows without padding."""
