"""Submissions: a request is checked, completed with every default, planned, and stored once as a job."""
