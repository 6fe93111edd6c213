"""Micro-batches: how a window is cut, how large they may be, and which size is fastest."""
