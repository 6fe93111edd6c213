"""`python -m app.cli` runs the accrue command where it is not on the PATH."""

from app.cli import main

main()
