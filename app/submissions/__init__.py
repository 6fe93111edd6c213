"""From a request to a job in the queue: checked, frozen, planned and stored once."""
