"""The losses: of tokens, of samples, and what they need to know of a whole window."""
