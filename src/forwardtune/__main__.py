"""`python -m forwardtune` is the `forwardtune` command."""

from forwardtune.cli import main

main()
