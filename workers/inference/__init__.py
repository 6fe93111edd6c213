"""Answers requests with base and tuned models."""
