"""Run as a program: walks, tells after each step that it is done, and waits to be killed.

python killed_writer.py FOLDER SEED
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.journal.shelf import TINY, opened
from tests.journal.walking import Walk

STEPS = 10_000  # more than anybody waits for


def main() -> None:
    device = opened(Path(sys.argv[1]), TINY).device
    for _ in Walk(device, int(sys.argv[2])).steps(STEPS):
        os.write(1, b".")


main()
