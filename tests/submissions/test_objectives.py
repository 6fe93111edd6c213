"""Requests for preference objectives, as a client sends them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.contract.data_formats import DataFormat
from app.settings import Settings
from app.submissions.objectives import warning_of_labels, warning_of_questions
from tests.harness.requests import PATH, service

PAIRS = [{"prompt": f"Say {each}", "chosen": " yes", "rejected": " no"} for each in range(8)]
LABELLED = [{"prompt": f"Say {each}", "completion": " yes", "label": each % 2 == 0} for each in range(8)]
CLASSIFIED = [{"text": f"This is {each}", "label": each % 3} for each in range(8)]
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {each}"}, {"role": "assistant", "content": "Yes."}]}
    for each in range(8)
]


class Service:
    """A service, and the answers to requests with these lines as training data."""

    def __init__(self, client: TestClient, header: dict[str, str]) -> None:
        self._client = client
        self._header = header

    def dry_run(self, lines: list[dict[str, Any]], **training: Any) -> Any:
        own = ("overlength", "validation_file_id")
        dataset = {key: training.pop(key) for key in own if key in training}
        body = {
            "model_name": "accrue/tiny-gpt2",
            "dataset_config": {"file_id": self._uploaded(lines), **dataset},
            "training_config": training,
            "target_effective_batch_size": 4,
            "dry_run": True,
        }
        return self._client.post(f"{PATH}/with-accumulation", json=body, headers=self._header)

    def openai_job(self, lines: list[dict[str, Any]], **given: Any) -> tuple[int, Any]:
        body = {"model": "accrue/tiny-gpt2", "training_file": self._uploaded(lines), **given}
        answer = self._client.post("/v1/fine_tuning/jobs", json=body, headers=self._header)
        return answer.status_code, answer.json()

    def _uploaded(self, lines: list[dict[str, Any]]) -> str:
        return str(self.file(lines)["id"])

    def file(self, lines: list[dict[str, Any]]) -> Any:
        """An uploaded file."""
        answer = self.upload(lines)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def upload(self, lines: list[dict[str, Any]]) -> Any:
        """The answer to an upload."""
        data = "\n".join(map(json.dumps, lines)).encode()
        return self._client.post(
            "/v1/files",
            files={"file": ("data.jsonl", data)},
            data={"purpose": "fine-tune"},
            headers=self._header,
        )


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    settings = Settings(
        data_dir=folder / "data",
        models_dir=folder / "models",
        offline=True,
        profiler=False,
        _env_file=None,  # type: ignore[call-arg]
    )
    settings.make_directories()
    with service(settings) as (client, header):
        yield Service(client, header)


@pytest.mark.parametrize(
    ("lines", "given", "objective", "rate"),
    [
        (PAIRS, {}, "dpo", 1e-6),
        (PAIRS, {"objective": "orpo", "method": "lora"}, "orpo", 1e-5),
        (PAIRS, {"objective": "simpo", "learning_rate": 3e-4}, "simpo", 3e-4),
        (LABELLED, {}, "kto", 1e-6),
        (CHATS, {}, "sft", 5e-5),
        (PAIRS, {"objective": "reward"}, "reward", 1e-5),
        (PAIRS, {"objective": "reward", "method": "lora"}, "reward", 1e-4),
        (CLASSIFIED, {}, "classification", 5e-5),
        (CLASSIFIED, {"method": "lora", "label_smoothing": 0.1}, "classification", 2e-4),
        (CLASSIFIED, {"objective": "sft"}, "sft", 5e-5),
        ([{"text": "a", "label": 0.5}] * 4, {}, "sft", 5e-5),
    ],
)
def test_the_data_decide_the_objective_and_its_rate(
    accrue: Service, lines: list[dict[str, Any]], given: dict[str, Any], objective: str, rate: float
) -> None:
    answer = accrue.dry_run(lines, **given)
    assert answer.status_code == 200, answer.text
    config = answer.json()["training_config"]
    assert (config["objective"], config["learning_rate"]) == (objective, rate)


@pytest.mark.parametrize(
    ("lines", "given", "field", "why"),
    [
        (CHATS, {"objective": "dpo"}, "objective", "each line has a prompt"),
        (PAIRS, {"objective": "kto"}, "objective", "labelled answers"),
        (PAIRS, {"objective": "sft"}, "objective", "which suits dpo, orpo, simpo"),
        (PAIRS, {"objective_args": {"gamma": 0.5}}, "objective_args", "gamma"),
        (PAIRS, {"objective": "ppo"}, "objective", "dpo"),
        (PAIRS, {"overlength": "split"}, "overlength", "truncate or error"),
        (PAIRS, {"label_smoothing": 0.1}, "label_smoothing", "objective_args.label_smoothing"),
        (LABELLED, {"objective_args": {"desirable_weight": 0, "undesirable_weight": 0}}, "objective_args",
         "both 0"),
        (LABELLED[:1], {}, "file_id", "two samples"),
        (CLASSIFIED, {"objective": "reward"}, "objective", "chosen"),
        (CHATS, {"objective": "classification"}, "objective", "labelled texts"),
        (CLASSIFIED[:1] * 2, {}, "file_id", "at least two classes"),
        ([{"text": "a", "label": each} for each in range(1001)], {}, "file_id", "1,000 different labels"),
        (CLASSIFIED, {"overlength": "split"}, "overlength", "truncate or error"),
        (CLASSIFIED, {"objective_args": {"beta": 0.1}}, "objective_args", "beta"),
        (PAIRS, {"objective": "reward", "label_smoothing": 0.1}, "label_smoothing", "reward"),
    ],
)  # fmt: skip
def test_what_an_objective_cannot_learn_from_is_refused(
    accrue: Service, lines: list[dict[str, Any]], given: dict[str, Any], field: str, why: str
) -> None:
    answer = accrue.dry_run(lines, **given)
    assert answer.status_code == 422, answer.text
    assert why in answer.text
    assert field in answer.text


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([10, 9, 2], ["2", "9", "10"]),
        (["b", "a", "ä"], ["a", "b", "ä"]),
        ([True, False, True], ["false", "true"]),
        (["01", "1", 1], ["01", "1"]),
        ([-1, 10, 0], ["-1", "0", "10"]),
    ],
)
def test_a_file_names_its_classes_in_order(accrue: Service, labels: list[Any], classes: list[str]) -> None:
    file = accrue.file([{"text": "a", "label": label} for label in labels])
    assert (file["format"], file["classes"]) == ("classification", classes)


def test_the_classes_of_validation_are_known(accrue: Service) -> None:
    other = accrue.file([{"text": "a", "label": 7}])["id"]
    answer = accrue.dry_run(CLASSIFIED, validation_file_id=other)
    assert answer.status_code == 422
    assert "label '7'" in answer.text
    many = accrue.file([{"text": "a", "label": each} for each in range(1001)])["id"]
    assert "more than 1,000 different labels" in accrue.dry_run(CLASSIFIED, validation_file_id=many).text
    known = accrue.file([{"text": "a", "label": 2}])["id"]
    assert accrue.dry_run(CLASSIFIED, validation_file_id=known).status_code == 200


@pytest.mark.parametrize("label", [None, 0.5, [], ""])
def test_a_line_without_a_label_is_named(accrue: Service, label: Any) -> None:
    answer = accrue.upload([*CLASSIFIED, {"text": "a", "label": label}])
    assert answer.status_code == 400
    assert "Line 9: label" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("label", "why"), [("", "must not be empty"), ("x" * 201, "200"), (10**300, "200")])
def test_what_is_no_label_is_said_plainly(accrue: Service, label: Any, why: str) -> None:
    message = accrue.upload([{"text": "a", "label": label}]).json()["error"]["message"]
    assert message.startswith("Line 1: label: must not")
    assert why in message


@pytest.mark.parametrize("multiplier", [1e9, 1e-12])
def test_a_learning_rate_out_of_range_is_refused(accrue: Service, multiplier: float) -> None:
    chosen = {"learning_rate_multiplier": multiplier}
    own = {"learning_rate": 1.0 if multiplier > 1 else 1e-6}
    status, answer = accrue.openai_job(CHATS, hyperparameters=chosen, training_config=own)
    assert (status, answer["error"]["param"]) == (400, "hyperparameters.learning_rate_multiplier")


def test_openai_s_method_is_answered_as_it_was_sent(accrue: Service) -> None:
    chosen = {"beta": 0.2, "batch_size": 4, "n_epochs": 1, "learning_rate_multiplier": 0.7}
    status, job = accrue.openai_job(PAIRS, method={"type": "dpo", "dpo": {"hyperparameters": chosen}})
    assert status == 200
    assert job["method"]["type"] == "dpo"
    assert job["method"]["dpo"]["hyperparameters"] == chosen


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"method": {"type": "dpo"}}, "method.type"),
        ({"training_config": {"objective": "dpo"}}, "training_config.objective"),
        ({"method": {"type": "supervised"}, "training_config": {"objective": "dpo"}}, "method.type"),
    ],
)
def test_an_unsuitable_objective_is_named_where_it_was_given(
    accrue: Service, given: dict[str, Any], param: str
) -> None:
    status, answer = accrue.openai_job(CHATS, **given)
    assert (status, answer["error"]["param"]) == (400, param)


def test_labels_that_no_objective_learns_from_get_a_warning() -> None:
    assert warning_of_labels((), "sft") is None
    assert warning_of_labels(("id",), "sft") is None
    warning = warning_of_labels(("id", "label"), None)
    assert warning is not None
    assert "sft learns from every line alike" in warning


@pytest.mark.parametrize(
    ("keys", "data_format", "named"),
    [
        (("id", "question"), "preference", "the field question is ignored: if question is the prompt"),
        (("question", "query"), "preference", "prompt=question); the field query is ignored, too"),
        (("system",), "preference", "the field system is ignored: what belongs to the prompt"),
        (("context", "system"), "prompt_completion", "the fields context and system are ignored"),
        (("question",), "prompt_completion", None),
        (("id", "source"), "preference", None),
        (("question",), "messages", None),
        (("question",), "text", None),
    ],
)
def test_a_question_that_is_not_read_gets_a_warning(
    keys: tuple[str, ...], data_format: DataFormat, named: str | None
) -> None:
    warning = warning_of_questions(keys, data_format)
    assert (warning is None) == (named is None)
    assert named is None or named in str(warning)
