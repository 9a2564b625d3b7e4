"""`python -m optigpu`, where the `optigpu` command is not on the path."""

from optigpu.cli import main

main()
