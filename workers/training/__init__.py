"""The trainer: knows its run directory, and no database, address or credential."""
