"""Accrue's service: HTTP in, jobs in a database, everything people read."""

from pathlib import Path

__version__ = "0.1.0"

PREFIX = __name__.removesuffix("app")
"""Before the names of packages: `accrue.` where they were installed from a wheel (setup.py), else nothing."""

FOLDER = Path(__file__).resolve().parents[1 + PREFIX.count(".")]
"""Where they are, for a child that is to find them."""
