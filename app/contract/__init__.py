"""What service and trainer share: spec, plan, reports of a run, examples. Needs pydantic and nothing else."""
