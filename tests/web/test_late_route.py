"""Routes are prepared at their first use, and never used half prepared."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from fastapi.dependencies.models import Dependant

from app.web.dependencies import own_turn
from app.web.thread_route import ThreadRoute

_PREPARED = """
from app.main import create_app
from app.web.late_route import LateRoute

routes = [route for route in create_app().routes if isinstance(route, LateRoute)]
prepared = [route.path for route in routes if "dependant" in vars(route)]
print(len(routes), *prepared)
"""


def _answer(number: int) -> dict[str, int]:
    """Says it."""
    return {"number": number}


def test_the_start_of_the_service_prepares_no_route() -> None:
    printed = subprocess.run([sys.executable, "-c", _PREPARED], capture_output=True, text=True, check=True)
    routes, *prepared = printed.stdout.split()
    assert int(routes) > 60
    assert prepared == []


def test_a_route_has_what_fastapi_gives_it() -> None:
    route = ThreadRoute("/say/{number}", _answer, methods=["get"], tags=["sayings"], status_code=201)
    assert (route.path, route.methods, route.tags) == ("/say/{number}", {"GET"}, ["sayings"])
    assert "dependant" not in vars(route)
    assert [field.name for field in route.dependant.path_params] == ["number"]
    assert (route.status_code, route.description, route.name) == (201, "Says it.", "_answer")
    assert route.response_field is not None
    with pytest.raises(AttributeError, match="'ThreadRoute' object has no attribute 'nothing'"):
        _ = route.nothing


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
