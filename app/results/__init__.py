"""What a job leaves behind, and what is made of it."""
