"""`python -m workers.training RUN_DIR`: one attempt at one job, in this process.

Exit status: 0 with outcome.json; 75 if interrupted by a signal; 73 if another trainer still holds the
directory; 74 if the disk is full; 76 or 77 for one of several ranks that cannot go on (run_directory.py); 1
otherwise, with failure.json if the trainer could say why.
"""

import argparse
import sys
from pathlib import Path

from workers.run_directory import RunDirectory
from workers.training.attempt import train
from workers.training.processes.preloading import ignore_signals

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m workers.training", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run directory with a spec.json")
    exit_status = train(RunDirectory(parser.parse_args().run_dir.absolute()))
    ignore_signals()
    sys.exit(exit_status)
