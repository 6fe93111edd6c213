"""The trainer's process: how it starts, what it can see and use, and how it ends."""
