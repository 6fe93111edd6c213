"""What surrounds every request: headers, limits, errors and how long answers took."""
