"""Rows of the comparison with Hugging Face Trainer, printed at the end of the test run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    what: str
    ours: str
    theirs: str


LINES: list[Line] = []


def compared(what: str, ours: float | str, theirs: float | str) -> None:
    """Adds a row; numbers are relative errors."""
    LINES.append(Line(what, _shown(ours), _shown(theirs)))


def rendered() -> list[str]:
    """The table in Markdown."""
    widths = [max(len(getattr(line, name)) for line in [*LINES, HEAD]) for name in ("what", "ours", "theirs")]
    rows = [HEAD, Line(*("-" * width for width in widths)), *LINES]
    return [
        f"| {row.what:<{widths[0]}} | {row.ours:<{widths[1]}} | {row.theirs:<{widths[2]}} |" for row in rows
    ]


HEAD = Line("promise", "Accrue", "Hugging Face Trainer")


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"
