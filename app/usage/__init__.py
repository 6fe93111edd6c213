"""How much time on devices each key has used, and its quota."""
