"""From what is asked to a job in the queue."""
