"""Models: their files, adapters, heads and parameters, and how they are loaded and saved."""
