"""GPUs, and the workers that have them."""
