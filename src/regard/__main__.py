"""``python -m regard``: the command, where it is not on the path."""

from regard.cli import main

main()
