"""Statistics of jobs, and their measured performance."""
