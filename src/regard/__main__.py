"""``python -m regard``: the command, where it is not on the path."""

from regard.cli.app import main

main()
