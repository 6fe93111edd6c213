"""Looking after the data folder: backup, retention, locks, `accrue doctor`."""
