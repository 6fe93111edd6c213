"""Service and worker as processes."""
