"""Security: who may use this service, and for what."""
