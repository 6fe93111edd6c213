"""Base models and trained models, by name."""
