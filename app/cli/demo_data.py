"""The demo's data: signatures and docstrings of the running Python's standard library.

Each function, method and class with a docstring is one sample: its signature is the prompt, its
docstring the completion. Sources are read and parsed, never imported.
"""

import ast
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path

_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
_LONGEST = 4000

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str


def samples() -> Iterator[Sample]:
    """The samples, ordered by source file and without duplicates."""
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[Sample] = set()
    for source in sorted(library.rglob("*.py")):
        parts = source.relative_to(library).parts
        if _SKIPPED.intersection(parts):
            continue
        for sample in _of_module(source, parts):
            if sample not in seen:
                seen.add(sample)
                yield sample


def write(path: Path) -> int:
    """Writes the samples as JSON lines of prompt and completion. Returns their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for sample in samples():
            file.write(json.dumps({"prompt": sample.prompt, "completion": sample.completion}) + "\n")
            count += 1
    return count


def byte_entropy(path: Path) -> float:
    """Entropy of the completions' bytes, in nats: the loss of a model that knows only byte frequencies.

    The end of a completion counts as one more symbol, since the model has to predict it too.
    """
    counts: Counter[int] = Counter()
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            counts.update(json.loads(line)["completion"].encode())
            counts[256] += 1
    total = sum(counts.values())
    return -sum(count / total * log(count / total) for count in counts.values())


def _of_module(source: Path, parts: tuple[str, ...]) -> Iterator[Sample]:
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return  # sources for other Pythons, and files that are broken on purpose
    module = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) <= _LONGEST:
                yield Sample(f"# {module}\n{_signature(node)}\n", docstring)


def _signature(node: Documented) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"
