"""Devices: which one a rank trains on, its memory, its errors, its time and its temperature."""
