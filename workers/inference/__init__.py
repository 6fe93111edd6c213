"""Answers requests with base and trained models."""
