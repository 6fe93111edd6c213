"""The results of jobs: metrics, logs, checkpoints, models, and comparisons of them."""
