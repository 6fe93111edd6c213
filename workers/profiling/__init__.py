"""Profiles: how much memory a training step takes, simulated without the weights or measured for real."""
