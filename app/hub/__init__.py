"""Requests to the hub, whose answers are not trusted."""
