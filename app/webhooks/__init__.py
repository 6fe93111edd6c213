"""Telling others that a job ended or was paused, as Standard Webhooks (standardwebhooks.com)."""
