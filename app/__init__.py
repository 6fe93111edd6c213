"""Accrue's service: HTTP in, jobs in a database, everything people read."""

__version__ = "0.1.0"
