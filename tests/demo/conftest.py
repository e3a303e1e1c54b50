"""The demo is no part of the distribution, so its tests name where it lies."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
for folder in ("benchmarks", "examples"):
    sys.path.insert(0, str(REPOSITORY / folder))
