"""The command's own way to the service: httpx, and errors as one sentence."""

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import httpx2 as httpx


class ServiceError(Exception):
    """The service refused, or was not there; the message says what to do."""


class Client:
    """Speaks to one service, with the key of ACCRUE_API_KEY where there is one."""

    def __init__(self, url: str, timeout_seconds: float = 60.0) -> None:
        import httpx2 as httpx

        key = os.environ.get("ACCRUE_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._http = httpx.Client(base_url=url, timeout=timeout_seconds, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **kw: Any) -> Any:
        return self._ask("GET", path, **kw).json()

    def post(self, path: str, body: Any) -> Any:
        try:
            return self._ask("POST", path, json=body).json()
        except ValueError as error:  # a number that JSON does not have
            raise ServiceError(str(error)) from None

    def upload(self, file: Path) -> Any:
        with file.open("rb") as content:
            answer = self._ask(
                "POST", "/v1/files", files={"file": (file.name, content)}, data={"purpose": "fine-tune"},
                timeout=None,
            )  # fmt: skip
        return answer.json()

    def _ask(self, method: str, path: str, **kw: Any) -> "httpx.Response":
        import httpx2 as httpx

        try:
            answer = self._http.request(method, path, **kw)
        except httpx.ConnectError:
            raise ServiceError(
                f"no service answers at {self._http.base_url}: start one with accrue up, or say --url"
            ) from None
        except httpx.HTTPError as error:
            raise ServiceError(f"{self._http.base_url}: {error}") from None
        if answer.is_error:
            raise ServiceError(_detail(answer))
        return answer


def _detail(answer: "httpx.Response") -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the service answers {answer.status_code}"
