"""Training data: samples are read, rendered, turned into tokens, and loaded for each window."""
