"""Checkpoints: what they keep, how they are written and read, and what happens on a full disk."""
