"""The entry: compose and check a run, then plan or launch it; `python train.py --help` shows how."""

# Hydra's completion for fish looks for the word @hydra.main in this file.
import sys

from src.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
