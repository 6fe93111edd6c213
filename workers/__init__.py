"""The worker: a supervisor that claims jobs, and the trainer that it runs for each of them."""
