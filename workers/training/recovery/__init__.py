"""What happens to a window that cannot be applied: replay, skip, or give up."""
