"""`python -m mtlaunch.launcher`: the command line, where its script is not on PATH."""

from mtlaunch.launcher.cli import main

main()
