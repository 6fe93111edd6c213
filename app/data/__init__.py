"""Training files and data sets."""
