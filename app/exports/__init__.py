"""Exports of trained models, which a worker makes and verifies."""
