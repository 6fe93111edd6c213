"""Routes are prepared at their first use, and never used half prepared."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app.web.dependencies import own_turn
from app.web.late_route import LateRoute
from app.web.thread_route import ThreadRoute

_PREPARED = """
from app.main import create_app
from app.web.late_route import LateRoute

routes = [route for route in create_app().routes if isinstance(route, LateRoute)]
prepared = [route.path for route in routes if "dependant" in vars(route)]
print(len(routes), *prepared)
"""


_ALL_USED = """
from app.main import create_app
from app.web.late_route import LateRoute

routes = [route for route in create_app().routes if isinstance(route, LateRoute)]
bodies = [route.body_field for route in routes if route.app and route.body_field]
print(len(bodies))
for body in bodies:
    body.validate({}, loc=("body",))
"""


def _answer(number: int) -> dict[str, int]:
    """Says it."""
    return {"number": number}


def test_the_start_of_the_service_prepares_no_route() -> None:
    printed = subprocess.run([sys.executable, "-c", _PREPARED], capture_output=True, text=True, check=True)
    routes, *prepared = printed.stdout.split()
    assert int(routes) > 60
    assert prepared == []


def test_all_routes_can_be_prepared_without_a_warning() -> None:
    command = [sys.executable, "-W", "error::UserWarning", "-c", _ALL_USED]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 10


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_route_has_what_fastapi_gives_it() -> None:
    route = ThreadRoute("/say/{number}", _answer, methods=["get"], tags=["sayings"], status_code=201)
    assert (route.path, route.methods, route.tags) == ("/say/{number}", {"GET"}, ["sayings"])
    assert (route.name, route.include_in_schema) == ("_answer", True)
    assert "dependant" not in vars(route)
    assert [field.name for field in route.dependant.path_params] == ["number"]
    assert (route.status_code, route.description) == (201, "Says it.")
    assert route.response_field is not None
    with pytest.raises(AttributeError, match="'ThreadRoute' object has no attribute 'nothing'"):
        _ = route.nothing


@pytest.mark.usefixtures("many_switches")
def test_threads_that_use_a_route_at_once_see_it_complete() -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(25):
            route = ThreadRoute("/say/{number}", _answer)
            together = Barrier(8)

            def prepared(route: ThreadRoute = route, together: Barrier = together) -> Dependant:
                together.wait()
                return route.dependant

            for each in [threads.submit(prepared) for _ in range(8)]:
                assert [part.call for part in each.result().dependencies] == [own_turn]


def test_a_thread_that_looked_before_another_had_prepared_the_route_finds_the_attribute() -> None:
    route = ThreadRoute("/say/{number}", _answer)
    assert route.dependant is route.__getattr__("dependant")


class _Broken(LateRoute):
    def _prepared(self, options: dict[str, Any]) -> APIRoute:
        raise AttributeError("one of FastAPI's")


def test_a_route_that_cannot_be_prepared_says_so() -> None:
    """An AttributeError would make `getattr` with a default hide it."""
    with pytest.raises(RuntimeError, match="/say cannot be prepared"):
        getattr(_Broken("/say", _answer), "app", None)
