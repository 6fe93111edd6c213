"""Sends Standard Webhooks (standardwebhooks.com) when a job ends or is paused."""
