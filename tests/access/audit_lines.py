"""What the audit log of host0 says."""

import json
from typing import Any

from tests.running_kvd import AUDIT_LOG, RunningKvd


def audit_lines(kvd: RunningKvd, event: str = "") -> list[dict[str, Any]]:
    """Of one event, or all; in order."""
    path = kvd.run_dir / "host0" / AUDIT_LOG
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if event in ("", line["event"])]
