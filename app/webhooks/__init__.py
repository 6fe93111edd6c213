"""Notifies others by Standard Webhooks (standardwebhooks.com) that a job ended or was paused."""
