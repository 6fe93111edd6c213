"""Requests that the OpenAPI document allows or forbids: no answer is a 5xx or undocumented.

Where an operation asks for a key, it is also called without one, and with a wrong one (`ignored_auth`).
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.errors import FlakyStrategyDefinition
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from app.main import create_app
from app.settings import Settings
from tests.harness.service import Accrue, running

pytestmark = pytest.mark.thorough

CASES = int(os.environ.get("ACCRUE_FUZZ_CASES", "0"))
"""Random cases per operation and kind of data (`make test-fuzz`); 0: a few fixed ones."""

FEW = 4
DRAWING: dict[str, Any] = {
    "max_examples": CASES or FEW,
    "derandomize": not CASES,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}

TOGETHER = 16
"""Random sequences of calls that Hypothesis draws with a memory of each other."""

LONGEST_QUERY = 60_000

FRAMING = {"connection", "content-length", "expect", "host", "transfer-encoding", "upgrade"}

with tempfile.TemporaryDirectory() as _folder:
    SCHEMA = schemathesis.openapi.from_dict(create_app(Settings(data_dir=Path(_folder))).openapi())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
KINDS = [
    (label, mode)
    for label, operation in OPERATIONS.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode == GenerationMode.POSITIVE or operation.body or list(operation.iter_parameters())
]
"""Each operation with valid data and, if it takes any, with invalid data."""


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    with running(tmp_path_factory.mktemp("accrue")) as accrue:
        shown = accrue.command("keys", "create", "fuzz", "--scope", "admin")
        accrue.key = shown.stdout.strip()
        accrue.serve()
        yield accrue


@pytest.mark.parametrize(("label", "mode"), KINDS)
def test_every_operation(accrue: Accrue, label: str, mode: GenerationMode) -> None:
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(**DRAWING)
    def answers_as_documented(case: Any) -> None:
        assume(mode == GenerationMode.POSITIVE or (is_http(case) and is_sent_whole(case)))
        case.call_and_validate(
            base_url=accrue.url, headers=accrue.header, excluded_checks=[positive_data_acceptance]
        )

    answers_as_documented()  # but may refuse by 422 what no schema can express


def is_http(case: Any) -> bool:
    """Whether the server's parser lets a request with these header fields through to the app: their names
    are tokens (RFC 9110, 5.1), and none of them says where a message ends."""
    return all(
        re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) and name.lower() not in FRAMING
        for name in case.headers or {}
    )


def is_sent_whole(case: Any) -> bool:
    """Whether drawn parameters stay distinguishable from allowed ones in the URL: an empty list or object
    leaves no trace in it, a list of one member looks like that member, an object's members look like
    parameters with their names, and an object of one object looks like the latter's name. The server's
    parser refuses a URL of more than 64 KiB by itself."""
    query = case.query or {}
    names = {parameter.name for parameter in case.operation.query}
    fits = len(urlencode(query, doseq=True, errors="replace")) < LONGEST_QUERY
    return fits and all(_leaves_its_kind(value, names) for value in query.values())


def _leaves_its_kind(value: Any, names: set[str]) -> bool:
    if isinstance(value, list):
        return len([each for each in value if each not in (None, {}, [])]) > 1
    if isinstance(value, dict) and names & set(value):
        return False
    if isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), dict):
        return False
    return value not in ({}, None)


def test_random_sequences_of_calls(accrue: Accrue) -> None:
    class Calls(SCHEMA.as_state_machine()):  # type: ignore[misc]
        """What one answer names goes into the next request."""

        def get_call_kwargs(self, case: schemathesis.Case) -> dict[str, Any]:
            return {"base_url": accrue.url, "headers": accrue.header}

        def validate_response(self, response: Any, case: schemathesis.Case, **kw: Any) -> None:
            lost = [] if is_sent_whole(case) else [negative_data_rejection]
            case.validate_response(response, excluded_checks=[positive_data_acceptance, *lost])

    most = 4 * (CASES or FEW)
    for first in range(0, most, TOGETHER):
        # What can follow an answer depends on the service's state, so that Hypothesis may find no sequence
        # that begins as an earlier one: it then begins again, without its memory of these.
        with contextlib.suppress(FlakyStrategyDefinition):
            Calls.run(
                settings=settings(
                    **{**DRAWING, "max_examples": min(TOGETHER, most - first)}, stateful_step_count=8
                )
            )
