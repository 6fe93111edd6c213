"""What crosses the wire, and what is frozen into a run directory. Needs pydantic and nothing else."""
