"""`make families`: trains a small model of every family that transformers' AutoModelForCausalLM builds, and
of the known ones with towers for images.

Each has random weights, two layers of width 32 and the built-in tokenizer. For each: is it accepted, does
the whole trainer make two steps, by how much do two splits of the first window differ in fp32 (the
certificate) and in fp64, and does transformers load the result with all of its weights? Writes
results/families.md.
"""

import json
import multiprocessing
import queue
import sys
import tempfile
import warnings
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
_SECONDS = 240
_SAMPLES = 8


def examine(family: str) -> dict[str, Any]:
    """What happens to a family; a step that fails says why."""
    from transformers import AutoConfig

    from tests.harness.any_family import lay_any, make_any, small_config
    from tests.harness.runs import events_of, small_data
    from tests.harness.specs import make_spec
    from tests.harness.training import run_to_end
    from workers.training.gradients import direct_sums
    from workers.training.models.auto_class import auto_class

    direct_sums.LEAST_ELEMENTS = 1  # as for the large weights of real models
    found: dict[str, Any] = {"family": family}
    try:
        config = small_config(family)
    except Exception as error:
        return found | {"failed": f"no small config: {_line(error)}"}
    try:
        found["error_in_fp64"] = error_in_fp64(make_any(config, torch.float64))
    except Exception as error:
        found["no_fp64"] = _line(error)
    with tempfile.TemporaryDirectory() as folder:
        spec = make_spec(data=small_data(), max_steps=2, certificate=True, effective_batch_size=_SAMPLES)
        try:
            run = lay_any(Path(folder) / "run", family, spec)
            outcome = run_to_end(run)
            saved_as = auto_class(AutoConfig.from_pretrained(run.model))
            loaded: Any = saved_as.from_pretrained(run.model, output_loading_info=True)
        except Exception as error:
            return found | {"failed": _line(error)}
        model, info = loaded
        found["steps"], found["certificate"] = outcome.steps, outcome.equivalence_error
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        found["lost_weights"] = len(info["missing_keys"]) + len(info["unexpected_keys"])
        found["notes"] = [
            event["message"] for event in events_of(run) if event["level"] == "warning"
            and "eager is used" not in event["message"]
        ]  # fmt: skip
    return found


def error_in_fp64(model: Any) -> float:
    """The relative difference between the gradients of a window in one micro-batch and in four."""
    from workers.training.losses.loss import TokenLoss
    from workers.training.micro_batches.batches import BatchLayout, collate

    random = np.random.default_rng(0)
    rows = []
    for _ in range(_SAMPLES):
        length = int(random.integers(3, 40))
        rows.append((random.integers(1, 250, length).astype(np.int32), np.arange(length) >= length // 3))
    targets = sum(int(counts[1:].sum()) for _, counts in rows)
    loss = TokenLoss(model.eval(), chunked=False)
    gradients = []
    for groups in ([range(_SAMPLES)], [(0, 3), (1,), (2, 4, 5), (6, 7)]):
        model.zero_grad()
        for group in groups:
            batch = collate([rows[sample] for sample in group], BatchLayout(0))
            (loss(batch).loss_sum / targets).backward()
        own = [p.grad for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat([each.flatten().double() for each in own]))
    whole, split = gradients
    return float((whole - split).norm() / whole.norm())


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _examine(family: str, answers: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers.put(examine(family))


def examine_all(families: list[str]) -> list[dict[str, Any]]:
    """Examines families one after another, each in a process of its own."""
    context, found = multiprocessing.get_context("fork"), []
    for family in families:
        answers = context.Queue()
        process = context.Process(target=_examine, args=(family, answers))
        process.start()
        try:
            row = answers.get(timeout=_SECONDS)
        except queue.Empty:
            row = {"family": family, "failed": f"took more than {_SECONDS} s"}
            process.kill()
        process.join()
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def render(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    trained = [row for row in rows if row.get("steps") == 2 and not row["lost_weights"]]
    exact = [row for row in trained if row["certificate"] is not None and row["certificate"] <= 1e-5]
    exact_in_fp64 = [row for row in trained if row.get("error_in_fp64", 1.0) <= 1e-12]
    lines = [
        "# Families of causal language models\n",
        f"{datetime.now(UTC).date().isoformat()}, transformers {version('transformers')}, torch "
        f"{version('torch')}, CPU; `make families`. Of {len(rows)} families, {len(trained)} trained two "
        "steps and were loaded again by transformers with all weights; "
        f"{len(exact)} of these with a certificate of at most 1e-5 in fp32, {len(exact_in_fp64)} with at "
        "most 1e-12 in fp64 (others compute parts in fp32, whatever the model's precision).\n",
        "| family | parameters | certificate (fp32) | fp64 | notes |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        fp64 = f"{row['error_in_fp64']:.0e}" if "error_in_fp64" in row else "-"
        if "failed" in row:
            lines.append(f"| {row['family']} | | | {fp64} | not trained: {_cell(row['failed'])} |")
            continue
        certificate = "-" if row["certificate"] is None else f"{row['certificate']:.0e}"
        notes = _cell(" ".join(row["notes"]))
        lines.append(f"| {row['family']} | {row['parameters']:,} | {certificate} | {fp64} | {notes} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:220]


def main() -> None:
    from app.planning.families import MULTIMODAL
    from tests.harness.any_family import ALL

    rows = examine_all(sys.argv[1:] or [*ALL, *sorted(MULTIMODAL)])
    if not sys.argv[1:]:
        (RESULTS / "families.md").write_text(render(rows))
    print(render(rows).split("\n| family")[0])


if __name__ == "__main__":
    main()
