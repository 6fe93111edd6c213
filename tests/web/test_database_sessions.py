"""Many requests at once that read and write the database."""

import time
from concurrent.futures import ThreadPoolExecutor

from fastapi.testclient import TestClient

CONFIG = "/gradient-accumulation/config"
MORE_THAN_THREADS = 80


def test_more_writes_at_once_than_threads_do_not_wait_for_each_other(client: TestClient) -> None:
    own = client.post(CONFIG, json={"accumulation_steps": 4}).json()["config_id"]

    def write(number: int) -> int:
        path = f"{CONFIG}/{own}"
        given = {"accumulation_steps": number + 1}
        return (client.patch(path, json=given) if number % 2 else client.get(path)).status_code

    began = time.monotonic()
    with ThreadPoolExecutor(MORE_THAN_THREADS) as pool:
        assert set(pool.map(write, range(2 * MORE_THAN_THREADS))) == {200}
    assert time.monotonic() - began < 25  # a lock is waited for for 30 s
