"""`python -m fullcp`."""

from fullcp.cli import main

main()
