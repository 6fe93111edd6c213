"""Looking after the data folder."""
