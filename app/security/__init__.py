"""Who may drive this service."""
