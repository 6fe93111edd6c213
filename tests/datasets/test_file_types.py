"""The same samples in every kind of file and every known shape."""

import csv
import errno
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from app.contract.data_formats import parse_line
from app.contract.row_shapes import ColumnField, mapped
from app.datasets import conversion
from app.datasets.conversion import convert
from app.datasets.file_types import ReadOptions
from app.settings import Settings

QUESTIONS = [("Add, and say “why”.", "1 + 1", "2", 1.0), ("Name a colour\nor two.", "", "red; blue", 0.5)]

CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "\n\n".join(part for part in (instruction, given) if part)},
            {"role": "assistant", "content": output},
        ],
        "weight": weight,
    }
    for instruction, given, output, weight in QUESTIONS
]
ALPACA: list[dict[str, Any]] = [
    {"instruction": instruction, "input": given, "output": output, "weight": weight}
    for instruction, given, output, weight in QUESTIONS
]
SHAREGPT: list[dict[str, Any]] = [
    {
        "conversations": [
            {"from": "human", "value": chat["messages"][0]["content"]},
            {"from": "gpt", "value": chat["messages"][1]["content"]},
        ],
        "weight": chat["weight"],
    }
    for chat in CHATS
]
CONVERSATIONAL: list[dict[str, Any]] = [
    {"prompt": chat["messages"][:1], "completion": chat["messages"][1:], "weight": chat["weight"]}
    for chat in CHATS
]
PARTS: list[dict[str, Any]] = [
    {
        "messages": [
            {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat["messages"]
        ],
        "weight": chat["weight"],
    }
    for chat in CHATS
]


pytestmark = pytest.mark.sqlite
"""Nothing here depends on the database."""


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def array(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def table(delimiter: str = ",", encoding: str = "utf-8") -> Callable[[list[dict[str, Any]]], bytes]:
    def written(rows: list[dict[str, Any]]) -> bytes:
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    key: value if isinstance(value, str | float) else json.dumps(value)
                    for key, value in row.items()
                }
            )
        return file.getvalue().encode(encoding)

    return written


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


KINDS = {
    "jsonl": lines,
    "json": array,
    "csv": table(),
    "semicolons.csv": table(";"),
    "utf16.csv": table(encoding="utf-16"),
    "bom.csv": table(encoding="utf-8-sig"),
    "tsv": table("\t"),
    "parquet": parquet,
}
SHAPES = {
    "chats": CHATS,
    "alpaca": ALPACA,
    "sharegpt": SHAREGPT,
    "conversational": CONVERSATIONAL,
    "parts": PARTS,
}


def upload(client: TestClient, name: str, content: bytes, **fields: str) -> Any:
    form = {"purpose": "fine-tune", **fields}
    return client.post("/v1/files", files={"file": (name, content)}, data=form).json()


def examples_of(content: bytes) -> list[Any]:
    """What the trainer tokenises of each line."""
    return [parse_line(line)[1].model_dump(exclude_none=True) for line in content.splitlines()]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *(
            (kind, shape)
            for kind in ("jsonl", "json", "csv", "parquet")
            for shape in SHAPES
            if (kind, shape) != ("csv", "conversational")
        ),
        *((kind, "alpaca") for kind in KINDS),
    ],
)
def test_the_same_samples_are_trained_on_whatever_their_file(
    client: TestClient, kind: str, shape: str
) -> None:
    file = upload(client, f"data.{kind}", KINDS[kind](SHAPES[shape]))
    assert (file.get("format"), file.get("examples")) == ("messages", 2), file
    stored = client.get(f"/v1/files/{file['id']}/content").content
    assert examples_of(stored) == examples_of(lines(CHATS))


def test_json_lines_are_kept_byte_by_byte(client: TestClient) -> None:
    file = upload(client, "data.jsonl", lines(ALPACA))
    assert client.get(f"/v1/files/{file['id']}/content").content == lines(ALPACA)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_columns_are_assigned_to_fields(client: TestClient, kind: str) -> None:
    rows = [
        {"question": "2+2", "answer": "4", "prompt": "no"},
        {"question": "", "answer": "NA", "prompt": ""},
    ]
    content = KINDS[kind](rows)
    as_json = json.dumps({"prompt": "question", "completion": "answer"})
    for fields in (
        {"columns": as_json},
        {"columns[prompt]": "question", "columns[completion]": "answer"},
    ):
        file = upload(client, f"data.{kind}", content, **fields)
        stored = client.get(f"/v1/files/{file['id']}/content").text.splitlines()
        expected = [{"prompt": "2+2", "completion": "4"}, {"prompt": "", "completion": "NA"}]
        assert [json.loads(line) for line in stored] == expected
    without = upload(client, f"data.{kind}", content)
    assert "columns=" in without["detail"]
    first = {"jsonl": "Line 1", "csv": "Row 2"}.get(kind, "Row 1")  # in a spreadsheet, the header is row 1
    missing = upload(client, f"data.{kind}", content, columns='{"text": "body"}')
    assert missing["detail"] == (f"{first} has no column 'body'; it has 'answer', 'prompt', 'question'.")


def test_openai_s_client_uploads_a_table_with_assigned_columns(client: TestClient) -> None:
    with openai.OpenAI(api_key="unused", base_url="http://127.0.0.1:8000/v1", http_client=client) as ours:  # type: ignore[arg-type]
        file = ours.files.create(
            file=("qa.csv", b"q,a\n1,2\n"), purpose="fine-tune",
            extra_body={"columns": {"prompt": "q", "completion": "a"}},
        )  # fmt: skip
        assert ours.files.content(file.id).read() == b'{"prompt": "1", "completion": "2"}\n'


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\ntwo\n\n\nthree"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("line", ["one", "two", "three"]),
    ],
)
def test_plain_text(client: TestClient, sample_by: str, expected: list[str]) -> None:
    file = upload(client, "book.txt", b"one\ntwo\n\n\nthree\n", sample_by=sample_by)
    stored = client.get(f"/v1/files/{file['id']}/content").text.splitlines()
    assert [json.loads(line)["text"] for line in stored] == expected


def test_a_document_is_split_unless_the_job_says_otherwise(client: TestClient) -> None:
    file = upload(client, "book.txt", b"word " * 5000)
    job = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file["id"]}}
    job = {**job, "training_config": {"max_steps": 2}, "dry_run": True}
    answer = client.post("/gradient-accumulation/training/with-accumulation", json=job).json()
    assert answer["dataset"]["overlength"] == "split"
    job["dataset_config"] = {"file_id": file["id"], "overlength": "truncate"}
    answer = client.post("/gradient-accumulation/training/with-accumulation", json=job).json()
    assert answer["dataset"]["overlength"] == "truncate"


def test_a_long_document_is_divided_at_the_ends_of_lines(client: TestClient, settings: Settings) -> None:
    line = "x" * 99 + "\n"
    file = upload(client, "long.txt", (line * (settings.max_line_bytes // 100 + 1000)).encode())
    texts = [
        json.loads(each)["text"] for each in client.get(f"/v1/files/{file['id']}/content").text.splitlines()
    ]
    assert len(texts) > 1
    assert "\n".join(texts) + "\n" == line * (settings.max_line_bytes // 100 + 1000)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", b"prompt,completion\na,b,c\n", "Row 2 has 3 cells, but there are 2 columns"),
        ("a.csv", b'prompt,completion\n"a,b\n', "Not valid CSV after row 1"),
        ("a.csv", b"prompt,prompt\na,b\n", "Two columns have the same name"),
        ("a.csv", b"prompt,completion,,\na,b,,c\n", "Row 2 has content in column 4, which has no name"),
        ("a.csv", b"text\n\xff\n", "Not UTF-8 text in row 1 or soon after"),
        ("a.csv", b"text\n", "no sample"),
        ("a.csv", b"text,weight\n,\n \n", "no sample"),
        ("a.csv", b"text,weight\nhi\n", "Row 2 has 1 cell, but there are 2 columns"),
        (
            "a.csv",
            b"Prompt, Completion \na,b\n",
            'columns={"completion": " Completion ", "prompt": "Prompt"}',
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            "Line 2: not valid JSON (Expecting value at character 9)",
        ),
        ("a.csv", b"", "no sample"),
        ("a.csv", b"text,weight\nhi,much\n", "Row 2: weight: Input should be a valid number"),
        ("a.json", b'[{"text": "a"}, {"text": ', "Not valid JSON after row 1"),
        ("a.json", b'[{"text": "a"}, "b"]', "Row 2: expected a JSON object, found str"),
        ("a.json", b'[{"text": "a\\u0000"}]', "Row 1: text: has a NUL character"),
        ("a.json", b"[" * 100_000, "Row 1 is nested too deeply"),
        ("a.json", b"[]", "no sample"),
        ("a.json", b'[{"text": "a"}', "Not valid JSON after row 1"),
        ("a.json", b'[{"text": "a"},]', "Not valid JSON after row 1"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "Not valid JSON after row 1"),
        ("a.json", b'[{"text": "\\ud800"}]', "lone surrogate"),
        ("a.json", b'[{"text": "a"}, \xff]', "Not UTF-8 text after row"),
        ("a.parquet", b"PAR1" + b"x" * 200 + b"PAR1", "Not a valid Parquet file"),
        ("a.parquet", b"text", "not a Parquet file"),
        ("a.xlsx", b"PK\x03\x04", "save the file as CSV"),
        ("a.arrow", b"ARROW1", "save the file as CSV, JSONL or Parquet"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "save the file as UTF-8"),
        ("a.txt", "a\n".encode("utf-16"), "save the file as UTF-8"),
        ("a.txt", b"\n \n", "no sample"),
        ("a.txt", b"\xff\xfe\x00", "Not UTF-8 text"),
        ("a.jsonl", b'{"instruction": 1, "output": "a"}', "Line 1: instruction is not a string"),
        ("a.jsonl", b'{"conversations": [{"from": "dog", "value": "a"}]}', "from is 'dog'"),
        ("a.jsonl", b'{"conversations": [{"from": ["x"], "value": "a"}]}', "from is ['x']"),
        ("a.jsonl", b'{"messages": "hello"}', "messages is a string that is not valid JSON"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": null}]}', "content"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "is of type 'image_url': only text can be trained on",
        ),
        ("a.jsonl", b'{"text": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    ],
)
def test_bad_files_are_rejected_with_the_reason(
    client: TestClient, settings: Settings, name: str, content: bytes, problem: str
) -> None:
    answer = upload(client, name, content)
    if problem:
        assert problem in answer["detail"]
        assert list(settings.files_dir.iterdir()) == []


@pytest.mark.parametrize(
    "columns", ["[]", "{", '{"question": "prompt"}', '{"text": 1}', '{"text": ""}', '{"text": "\\u0000"}']
)
def test_bad_columns_are_rejected(client: TestClient, columns: str) -> None:
    answer = upload(client, "a.csv", b"text\na\n", columns=columns)
    assert answer["status"] == 400
    assert answer["error"]["param"] == "columns"


def test_a_parquet_file_that_expands_enormously_is_rejected(
    client: TestClient, settings: Settings, tmp_path: Path
) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 100_000]))
    pq.write_table(pa.table({"text": column}), tmp_path / "bomb.parquet")
    content = (tmp_path / "bomb.parquet").read_bytes()
    assert len(content) < 2**20
    client.app.state.settings = settings.model_copy(update={"max_file_bytes": 2**26})  # type: ignore[attr-defined]
    answer = upload(client, "bomb.parquet", content)
    assert "ACCRUE_MAX_FILE_BYTES" in answer["detail"]
    assert list(settings.files_dir.iterdir()) == []


def test_a_folder_of_files_is_a_data_set(tmp_path: Path, settings: Settings, client: TestClient) -> None:
    folder = tmp_path / "datasets" / "qa" / "data"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"train-{number}.parquet").write_bytes(parquet([{"q": f"q{number}", "a": "b"}]))
    (folder / "test-0.parquet").write_bytes(parquet([{"q": "no", "a": "no"}]))
    client.app.state.settings = settings.model_copy(update={"datasets_dir": tmp_path / "datasets"})  # type: ignore[attr-defined]
    columns = {"instruction": "q", "output": "a"}
    job = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"dataset": "qa", "columns": columns}}
    answer = client.post("/gradient-accumulation/training/with-accumulation", json=job).json()
    assert (answer["dataset"]["format"], answer["dataset"]["examples"]) == ("messages", 2)
    stored = (settings.files_dir / answer["dataset"]["file_id"]).read_text().splitlines()
    assert [json.loads(line)["instruction"] for line in stored] == ["q0", "q1"]
    assert not list(settings.files_dir.glob("*.upload"))
    wrong = {**job, "dataset_config": {"file_id": answer["dataset"]["file_id"], "columns": columns}}
    answer = client.post("/gradient-accumulation/training/with-accumulation", json=wrong)
    assert answer.status_code == 422
    assert "give columns with the upload" in answer.text


def test_a_json_array_larger_than_a_block_is_read_item_by_item(client: TestClient) -> None:
    rows = [{"text": f"{number} " + "é" * (number % 7000)} for number in range(300)]
    file = upload(client, "large.json", json.dumps(rows, ensure_ascii=False, indent=2).encode())
    stored = client.get(f"/v1/files/{file['id']}/content").text.splitlines()
    assert [json.loads(line) for line in stored] == rows


def test_binary_columns_of_a_parquet_file_are_text(client: TestClient) -> None:
    table_of_bytes = pa.table({"text": pa.array(["hé".encode()]), "image": pa.array([b"\xff\xfe"])})
    content = io.BytesIO()
    pq.write_table(table_of_bytes, content)
    file = upload(client, "a.parquet", content.getvalue())
    stored = client.get(f"/v1/files/{file['id']}/content").text
    assert json.loads(stored)["text"] == "hé"
    assert "b'" not in stored


def test_a_chat_s_tools_are_kept_when_its_column_is_assigned(client: TestClient) -> None:
    row = {"conv": CHATS[0]["messages"], "tools": [{"type": "function"}], "id": 7}
    file = upload(client, "a.json", array([row]), columns='{"messages": "conv"}')
    stored = json.loads(client.get(f"/v1/files/{file['id']}/content").text)
    assert stored == {"messages": row["conv"], "tools": row["tools"]}
    row = {"q": "a", "input": "b", "output": "c", "other": "d"}
    file = upload(client, "a.json", array([row]), columns='{"instruction": "q", "output": "output"}')
    stored = json.loads(client.get(f"/v1/files/{file['id']}/content").text)
    assert stored == {"instruction": "a", "input": "b", "output": "c"}


def test_cleared_columns_of_a_spreadsheet_are_left_out(client: TestClient) -> None:
    file = upload(client, "a.csv", b"prompt,completion,,\na,b,, \n,,,\nc,d,,\n")
    lines = client.get(f"/v1/files/{file['id']}/content").text.splitlines()
    assert [json.loads(each) for each in lines] == [
        {"prompt": "a", "completion": "b"},
        {"prompt": "c", "completion": "d"},
    ]


def test_a_map_is_an_object_and_equal_names_of_columns_are_refused(client: TestClient) -> None:
    kind = pa.map_(pa.string(), pa.string())
    content = io.BytesIO()
    table_of_maps = pa.table({"text": ["a"], "more": pa.array([[("k", "v")]], kind)})
    pq.write_table(table_of_maps, content)
    file = upload(client, "a.parquet", content.getvalue())
    assert json.loads(client.get(f"/v1/files/{file['id']}/content").text)["more"] == {"k": "v"}
    twice = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), twice)
    assert "Two columns have the same name" in upload(client, "a.parquet", twice.getvalue())["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        {"columns[]": "x"},
        {"Columns": "{}"},
        {"columns.text": "a"},
        {"columns": '{"text": "a"}', "columns[text]": "a"},
    ],
)
def test_other_ways_to_assign_columns_are_refused(client: TestClient, fields: dict[str, str]) -> None:
    answer = upload(client, "a.csv", b"a\nb\n", **fields)
    assert "columns[prompt]=question" in answer["detail"]


def test_a_delimiter_within_quotes_is_not_counted(client: TestClient) -> None:
    file = upload(client, "a.csv", b'"a,b,c";text\n1;hello\n')
    assert json.loads(client.get(f"/v1/files/{file['id']}/content").text)["text"] == "hello"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("key", ["data", "train"])
def test_samples_below_a_key_of_a_json_object_are_found(
    client: TestClient, indent: int | None, key: str
) -> None:
    content = json.dumps({"version": "1.0", key: ALPACA * 100}, indent=indent).encode()
    file = upload(client, "a.json", content)
    stored = client.get(f"/v1/files/{file['id']}/content").content
    assert examples_of(stored) == examples_of(lines(CHATS * 100))


def test_a_json_file_may_have_json_lines_or_one_sample(client: TestClient) -> None:
    assert upload(client, "a.json", lines(CHATS))["examples"] == 2
    assert upload(client, "a.json", json.dumps({"text": "x" * 10_000}).encode())["examples"] == 1
    assert upload(client, "a.json", json.dumps({"text": "a"}, indent=1).encode())["examples"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_not_the_file_s_fault(settings: Settings, tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_bytes(b"text\n" + b"hello\n" * 10_000)
    with pytest.raises(OSError, match="No space left") as caught:
        convert([(source, "a.csv")], Path("/dev/full"), ReadOptions(), settings, "file")
    assert caught.value.errno == errno.ENOSPC


def test_a_missing_library_is_named(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in an installation without pyarrow."""
    (tmp_path / "pyarrow").mkdir()
    (tmp_path / "pyarrow" / "__init__.py").write_text("raise ModuleNotFoundError(name='pyarrow')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("app.datasets.conversion._PASSED_ON", (*conversion._PASSED_ON, "PYTHONPATH"))
    answer = upload(client, "data.parquet", KINDS["parquet"](ALPACA))
    assert answer["detail"] == "Reading this kind of file needs the Python package pyarrow."


def test_rows_of_empty_cells_are_skipped(client: TestClient) -> None:
    answer = upload(client, "a.csv", b"prompt;completion;\na;b;\n;;\n  \n\nc;d;\n")
    assert answer["examples"] == 2


@pytest.mark.parametrize(
    ("columns", "header", "kept"),
    [
        ({"text": "review"}, "review,label,weight", "text weight"),
        ({"text": "review", "label": "label"}, "review,label", "text label"),
        ({"prompt": "q"}, "q,completion,label,id", "prompt completion"),
        ({"prompt": "q", "label": "ok"}, "q,completion,ok", "prompt completion label"),
        ({"prompt": "q", "completion": "a"}, "q,a,label", "prompt completion"),
        ({"messages": "messages"}, "messages,prompt,chosen,rejected", "messages"),
        ({"completion": "a"}, "prompt,a", "prompt completion"),
        ({"instruction": "q"}, "q,input,output", "instruction input output"),
        ({"output": "a"}, "instruction,a", "instruction output"),
        ({"prompt": "q"}, "q,chosen,rejected", "prompt chosen rejected"),
        ({"chosen": "good"}, "prompt,good,rejected", "prompt chosen rejected"),
        ({"label": "class"}, "text,class", "text label"),
        ({"label": "class", "weight": "w"}, "text,class,w", "text label weight"),
        ({"label": "ok"}, "instruction,input,output,ok", "instruction input output label"),
        ({"weight": "w"}, "conversations,system,w", "conversations system weight"),
        ({"prompt": "q", "completion": "a"}, "q,a,chosen,rejected,text", "prompt completion"),
        ({"prompt": "completion", "completion": "prompt"}, "prompt,completion", "prompt completion"),
        (
            {"output": "a"},
            "instruction,input,system,history,response,id,a",
            "instruction input system history output",
        ),
        ({"output": "a"}, "instruction,context,a", "instruction context output"),
        ({"input": "i"}, "instruction,i,context,output", "instruction input output"),
        (
            {"chosen": "good", "rejected": "bad"},
            "instruction,input,good,bad,output",
            "instruction input chosen rejected",
        ),
        (
            {"chosen": "good", "rejected": "bad"},
            "conversations,system,good,bad",
            "conversations system chosen rejected",
        ),
        ({"instruction": "q"}, "q,chosen,rejected", "instruction chosen rejected"),
        ({"conversations": "c"}, "c,tools,system,chosen,rejected", "conversations tools system"),
        (
            {"conversations": "c", "chosen": "chosen"},
            "c,system,chosen,rejected",
            "conversations system chosen rejected",
        ),
        ({"system": "s"}, "s,messages,tools,id", "system messages tools"),
        ({"text": "t"}, "t,prompt,completion,label", "text"),
        ({"instruction": "q"}, "q,output,chosen,rejected", "instruction output chosen rejected"),
        ({"instruction": "q", "tools": "t"}, "q,output,t", "instruction output tools"),
        ({"output": "a", "tools": "t"}, "instruction,a,t", "instruction output tools"),
        ({"tools": "t"}, "instruction,output,t", "instruction output tools"),
    ],
)
def test_columns_that_complete_the_mapped_ones_are_kept(
    columns: dict[ColumnField, str], header: str, kept: str
) -> None:
    row = {name: f"the {name}" for name in header.split(",")}
    fields = mapped(row, columns)
    assert fields.keys() == set(kept.split())
    assert all(fields[name] == f"the {columns.get(name, name)}" for name in fields)  # type: ignore[call-overload]
