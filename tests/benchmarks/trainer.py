"""`make bench-trainer`: compares the trainer with transformers' Trainer, on the library's docstrings.

All contestants use the same model, data, order of samples, effective batch of 64, AdamW and fp32. They run
one after another, each in its own process, for several rounds; the figures are medians. Trainer with grouping
by length has the same data, but composes different windows. Peak memory is the resident peak during training,
minus what was resident once model and data were loaded. Writes results/trainer.json, trainer.md and
trainer.png.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.material import (
    EFFECTIVE_BATCH,
    MAX_LENGTH,
    SIZES,
    Size,
    make_model,
    texts_in,
    write_docstrings,
)

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
OURS = "Accrue, as planned"
FIXED_LENGTH = 256

RequestedBatch = dict[str, Any]
CONTESTANTS: dict[str, RequestedBatch] = {
    OURS: {"who": "accrue"},
    **{
        f"Trainer, batch {rows}": {"who": "hugging_face", "rows": rows, "grouped": False}
        for rows in (1, 4, 8, 16)
    },
    **{
        f"Trainer, batch {rows}, grouped": {"who": "hugging_face", "rows": rows, "grouped": True}
        for rows in (4, 8, 16)
    },
}
FIXED: dict[str, RequestedBatch] = {
    "Accrue, batch 8, fixed length": {"who": "accrue", "rows": 8},
    "Trainer, batch 8, fixed length": {"who": "hugging_face", "rows": 8, "grouped": False},
}


def run(requested: RequestedBatch, folder: Path) -> dict[str, Any]:
    """Runs one contestant in its own process."""
    shutil.rmtree(folder, ignore_errors=True)
    requested = {**requested, "folder": str(folder)}
    command = [sys.executable, "-m", "tests.benchmarks.contestants", json.dumps(requested)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if "RESULT " not in done.stdout:
        raise SystemExit(f"{requested} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.split("RESULT ")[1])
    return result


def measure(size: Size, base: Path, rounds: int) -> dict[str, Any]:
    """Runs every contestant on one model size, in rounds."""
    base.mkdir()
    variable, fixed, model = base / "data.jsonl", base / "fixed.jsonl", base / "model"
    write_docstrings(variable, size.windows * EFFECTIVE_BATCH)
    write_docstrings(fixed, 3 * EFFECTIVE_BATCH, FIXED_LENGTH)
    make_model(size, model, texts_in(variable))
    common = {"model": str(model), "windows": size.windows, "data": str(variable), "max_length": MAX_LENGTH}
    held = {"model": str(model), "windows": 3, "data": str(fixed), "max_length": FIXED_LENGTH}
    contestants = {
        **{name: {**common, **requested} for name, requested in CONTESTANTS.items()},
        **{name: {**held, **requested} for name, requested in FIXED.items()},
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, requested in contestants.items():
            result = run(requested, base / "run")
            found[name].append(result)
            rate = result["samples"] / result["seconds"]
            print(f"round {number + 1}: {name:32} {rate:7.1f} samples/s, "
                  f"peak {result['peak_bytes'] / 2**20:6.0f} MiB", flush=True)  # fmt: skip
    ratios = run({**held, "who": "overhead", "windows": size.windows + 1}, base / "run")
    return {"contestants": summarise(found), "overhead": median(ratios["ratios"]), "overheads": ratios}


def summarise(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        name: {
            "samples_per_second": median(r["samples"] / r["seconds"] for r in results),
            "rounds": [r["samples"] / r["seconds"] for r in results],
            "peak_mib": median(r["peak_bytes"] for r in results) / 2**20,
            "losses": results[0]["losses"],
            "padding": results[0]["padding"],
        }
        for name, results in found.items()
    }


def promises(measured: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """The promises: for each its name, the bound, the measured value, and whether it holds."""
    own = measured["contestants"]
    ours = own[OURS]
    theirs = {name: requested["grouped"] for name, requested in CONTESTANTS.items() if "grouped" in requested}
    best_plain, best_grouped = (
        max((own[name] for name, g in theirs.items() if g == grouped), key=lambda r: r["samples_per_second"])
        for grouped in (False, True)
    )
    batch8 = own["Trainer, batch 8"]

    def faster(other: dict[str, Any]) -> float:
        return float(ours["samples_per_second"] / other["samples_per_second"])

    fixed = [own[name]["samples_per_second"] for name in FIXED]
    curve = max(abs(a - b) / b for a, b in zip(ours["losses"], batch8["losses"], strict=True))
    rows = [
        ("speed relative to batch 8, at least", 2.0, faster(batch8)),
        ("speed relative to the fastest ungrouped, at least", 1.15, faster(best_plain)),
        ("speed relative to the fastest grouped, at least", 1.0, faster(best_grouped)),
        ("speed at fixed length and the same micro-batch, at least", 1.0, fixed[0] / fixed[1]),
    ]
    least = [(name, bound, value, value >= bound) for name, bound, value in rows]
    compared = (
        ("batch 8", batch8),
        ("the fastest ungrouped", best_plain),
        ("the fastest grouped", best_grouped),
    )
    most = [
        *(
            (f"memory relative to {name}, at most", 1.0, ours["peak_mib"] / r["peak_mib"])
            for name, r in compared
        ),
        ("relative difference of the loss curves, at most", 1e-4, curve),
        (
            "time of a window without optimizer, relative to 16 bare passes, at most",
            1.02,
            measured["overhead"],
        ),
    ]
    return least + [(name, bound, value, value <= bound) for name, bound, value in most]


def render(result: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# Accrue's trainer compared with transformers' Trainer\n\n"
        f"{result['machine']}. {result['date']}. `make bench-trainer`, medians of {result['rounds']}.\n"
    ]
    for size, measured in result["sizes"].items():
        lines.append(f"\n## {size}: {result['models'][size]}\n")
        lines.append("| contestant | samples/s | peak MiB |\n| --- | ---: | ---: |")
        lines += [
            f"| {name} | {r['samples_per_second']:.1f} | {r['peak_mib']:.0f} |"
            for name, r in measured["contestants"].items()
        ]
        lines.append("\n| promise | bound | measured | holds |\n| --- | ---: | ---: | --- |")
        lines += [
            f"| {name} | {bound:g} | {value:.3g} | {'yes' if holds else 'NO'} |"
            for name, bound, value, holds in promises(measured)
        ]
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plots speed over memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(
        1, len(result["sizes"]), figsize=(6 * len(result["sizes"]), 4.5), squeeze=False
    )
    kinds = {"Accrue": "#c0392b", "Trainer, grouped by length": "#2980b9", "Trainer": "#7f8c8d"}
    for axis, (size, measured) in zip(axes[0], result["sizes"].items(), strict=True):
        for name, r in measured["contestants"].items():
            if name in FIXED:
                continue
            ours, grouped = name.startswith("Accrue"), "grouped" in name
            kind = "Accrue" if ours else "Trainer, grouped by length" if grouped else "Trainer"
            place = (r["peak_mib"], r["samples_per_second"])
            axis.scatter(*place, color=kinds[kind], s=90 if ours else 45, zorder=3)
            label = "as planned" if ours else name.removeprefix("Trainer, ").removesuffix(", grouped")
            axis.annotate(label, place, xytext=(0, 9 if ours or grouped else -16),
                          textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
        axis.set(title=f"{size}: {result['models'][size]}", xlabel="peak memory while training, MiB",
                 ylabel="samples per second", xscale="log")  # fmt: skip
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
        axis.margins(x=0.12)
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(alpha=0.3)
    dots = [plt.Line2D([], [], color=color, marker="o", linestyle="", label=k) for k, color in kinds.items()]
    axes[0][-1].legend(handles=dots, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    arguments = parser.parse_args()
    rounds, sizes = arguments.rounds, {name: SIZES[name] for name in arguments.sizes}
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    result: dict[str, Any] = {
        "machine": f"CPU, 2 threads ({platform.machine()}), Python {platform.python_version()}, {packages}",
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": rounds,
        "models": {name: f"Llama, {size.layers} layers × {size.width}" for name, size in sizes.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        result["sizes"] = {name: measure(size, Path(folder) / name, rounds) for name, size in sizes.items()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "trainer.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "trainer.md").write_text(render(result))
    draw(result, RESULTS / "trainer.png")
    print(render(result))


if __name__ == "__main__":
    main()
