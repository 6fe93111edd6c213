"""Tests that need an NVIDIA GPU. They import torch, transformers and what the trainer needs, no more."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the folder's tests, saying so, where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
