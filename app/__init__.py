"""The Accrue service: HTTP API, job database, command line and dashboard."""

from pathlib import Path

__version__ = "0.1.0"

PACKAGE_PREFIX = __name__.removesuffix("app")
"""Prefix of the packages' names: `accrue.` if they were installed from a wheel (setup.py), else empty."""

PACKAGES_FOLDER = Path(__file__).resolve().parents[1 + PACKAGE_PREFIX.count(".")]
"""The folder that contains the packages: the working directory of child processes that import them."""
