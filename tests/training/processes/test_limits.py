import subprocess
import sys

from workers.training.processes.limits import OPEN_FILES

LIMITED = """
import resource, tempfile
from workers.training.processes.limits import limit
limit()
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
opened = []
try:
    while True:
        opened.append(tempfile.TemporaryFile())
except OSError as error:
    print(len(opened), error.strerror)
"""


def test_core_dumps_are_disabled_and_open_files_are_limited() -> None:
    told = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True).stdout
    count, _, why = told.strip().partition(" ")
    assert why == "Too many open files"
    assert OPEN_FILES - 20 < int(count) <= OPEN_FILES
