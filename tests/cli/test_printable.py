"""File names with control characters are shown on a terminal without taking effect."""

import pytest
from rich.console import Console

from app.cli import tables
from app.cli.client import printable

NAMES = ["\x1b[2J\x1b]0;owned\x07.jsonl", "[/bold].jsonl", "[red]x", "a\rb", "\u202egpj.exe", "\x9b31m"]


@pytest.mark.parametrize("name", NAMES)
def test_control_characters_in_names_are_escaped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(markup=False, record=True, width=200)
    monkeypatch.setattr(tables, "console", console)
    file = {"id": "file-1", "filename": name, "bytes": 1, "purpose": "fine-tune", "status": "processed"}
    tables.show_files(printable([file]))
    shown = console.export_text()
    assert not any(character in shown for character in "\x1b\x07\r\u202e\x9b")
    assert "jsonl" in shown or "jsonl" not in name
    assert ("[/bold]" in shown) is ("[/bold]" in name)


def test_lines_and_tabs_stay() -> None:
    assert printable({"a": ["b\n\tc", 1, None]}) == {"a": ["b\n\tc", 1, None]}
