"""Answers of base and trained models: requested by the service, made by a worker's inference process."""
