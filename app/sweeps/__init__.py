"""Sweeps: jobs that differ in a few fields, created by one request and compared in one table."""
