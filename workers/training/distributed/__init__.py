"""Several ranks that train one window together."""
