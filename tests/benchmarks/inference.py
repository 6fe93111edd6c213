"""`make bench-inference`: how soon and how fast a model answers, beside `transformers serve`.

Both serve the same small Llama in turns: sixteen clients at once and one client, each with greedy answers of
the same length through the same openai client. `transformers serve` runs as it does by default, and with
continuous batching. The benchmark also measures the time from the success of a job to the first token of its
model. It writes results/inference.json. `transformers serve` needs `pip install 'transformers[serving]'`;
without it, only Accrue is measured.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import openai

from tests.benchmarks.material import SIZES, make_model
from tests.harness.runs import until, write_texts
from tests.harness.service import Accrue, free_port, running

RESULTS = Path(__file__).parent / "results"
CLIENTS, TOKENS = 16, 128


@contextmanager
def transformers_serve(folder: Path, *, together: bool) -> Iterator[str]:
    """`transformers serve` with a model; its base URL."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--port", str(port),
        "--device", "cpu", "--log-level", "error", *(["--continuous-batching"] if together else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            until(lambda: process.poll() is not None or _answers(client, str(folder)), 120)
        assert process.poll() is None, "transformers serve did not start"
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _answers(client: openai.OpenAI, model: str) -> bool:
    try:
        client.completions.create(model=model, prompt="a", max_tokens=1)
    except openai.APIConnectionError:
        return False
    return True


def tokens_per_second(url: str, model: str, clients: int) -> float:
    """Tokens of all answers, per second."""
    made: list[int] = []
    asking = [
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) for _ in range(clients)
    ]  # before the clock starts: making one takes longer than a short answer
    for client in asking:
        client.completions.create(model=model, prompt="a", max_tokens=1)  # opens its connection

    def ask(number: int) -> None:
        answer = asking[number].completions.create(
            model=model,
            prompt=f"Return the number {number} of the list, and",
            max_tokens=TOKENS,
            temperature=0,
        )
        made.append(answer.usage.completion_tokens if answer.usage is not None else 0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    for client in asking:
        client.close()
    return sum(made) / seconds


def seconds_to_first_token(accrue: Accrue, folder: Path) -> float:
    """From the moment a client sees that a job has succeeded to the first token of its model."""
    file = accrue.upload(write_texts(folder / "texts.jsonl", count=200).read_bytes())
    training = {"max_steps": 900}
    job = accrue.submit(dataset_config={"file_id": file, "max_length": 64}, training_config=training)
    until(lambda: accrue.job(job)["status"] == "succeeded", 300)
    began = time.perf_counter()
    with openai.OpenAI(base_url=f"{accrue.url}/v1", api_key="none", timeout=120) as client:
        for _ in client.completions.create(model=job, prompt="one", max_tokens=4, stream=True):
            break
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/inference.json")
    parser.add_argument("--without-transformers", action="store_true")
    chosen = parser.parse_args()
    speeds: dict[str, list[float]] = {}

    def measure(name: str, url: str, model: str) -> None:
        for clients in (1, CLIENTS):
            speeds.setdefault(f"{name}, {clients} at once", []).append(tokens_per_second(url, model, clients))

    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        model = models / "small"
        make_model(
            SIZES["small"],
            model,
            [f"Return the number {number} of the list, and so on." for number in range(500)],
        )
        with running(Path(folder)) as accrue:
            accrue.serve()
            accrue.start("worker", ACCRUE_INFERENCE="auto", ACCRUE_CPU_THREADS=str(os.cpu_count()))
            first = seconds_to_first_token(accrue, Path(folder))
            print(f"from success to the first token: {first:.1f} s", flush=True)
            for _ in range(chosen.rounds):
                measure("accrue", f"{accrue.url}/v1", "small")
                if not chosen.without_transformers:
                    with transformers_serve(model, together=False) as url:
                        measure("transformers serve", url, str(model))
                    with transformers_serve(model, together=True) as url:
                        measure("transformers serve --continuous-batching", url, str(model))
    found = {name: round(median(own), 1) for name, own in speeds.items()}
    for name, speed in found.items():
        print(f"{name:55} {speed:8.1f} tokens/s")
    if chosen.save:
        write(first, found, chosen.rounds)


def write(first: float, found: dict[str, float], rounds: int) -> None:
    import torch
    import transformers

    content: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": "Llama, 4 layers of width 256, fp32",
        "rounds": rounds,
        "seconds_to_first_token": round(first, 2),
        "tokens_per_second": found,
    }
    (RESULTS / "inference.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
