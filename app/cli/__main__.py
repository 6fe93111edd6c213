"""`python -m app.cli`: the command where it is not on the path."""

from app.cli import main

main()
