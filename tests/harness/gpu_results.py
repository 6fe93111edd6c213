"""Results of the tests on a GPU, kept as files."""

import json
import os
from pathlib import Path
from typing import Any

import torch


def keep(name: str, figures: dict[str, Any]) -> None:
    """Adds figures to $OUT/gpu.json, with the device and versions."""
    print(name, figures)
    if "OUT" not in os.environ:
        return
    path = Path(os.environ["OUT"]) / "gpu.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known["device"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    path.write_text(json.dumps({**known, name: figures}, indent=1))
