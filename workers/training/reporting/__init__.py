"""What a run reports: log lines, validation, completions, profiles and trackers."""
