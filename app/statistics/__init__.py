"""Figures over all jobs, and how fast they were."""
