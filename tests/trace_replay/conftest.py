"""The benchmark packages are no part of the distribution, so the tests name where they lie."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
