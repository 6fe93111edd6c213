"""Answers of base and tuned models: requested by the service, made by a worker's inference process."""
