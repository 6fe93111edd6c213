"""Submissions: a request is checked, frozen, planned and stored once as a job."""
