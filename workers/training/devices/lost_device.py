"""Recognises errors of a GPU that has failed. Imports nothing, since torch may not be loaded yet."""

_DEVICE_LOST = (
    "uncorrectable ecc error", "fallen off the bus", "gpu is lost", "device is lost",
    "no cuda-capable device", "devices are busy or unavailable",
    "device(s) is/are busy or unavailable", "unknown error",
    "hardware stack error", "nvlink error", "contained memory error",
)  # fmt: skip
"""CUDA's messages for errors of the device, not of the program (CUDA runtime API, error codes)."""


def is_device_lost(message: str) -> bool:
    """Whether the message of an error says that the device failed, not the program."""
    return any(sign in message.lower() for sign in _DEVICE_LOST)
