"""What surrounds every request: middleware, error bodies, pagination, event streams, documentation."""
