"""What all processes of the demo agree on."""

import json
import sys
from typing import Any

POOL = "smollm2-135m"
POOL_BLOCKS = 640
BLOCK_SIZE = 16  # tokens
HOST_MEMORY = "480MiB"  # 640 blocks of 720 KiB, and the null block
CALL_TIMEOUT_S = 120.0  # a busy machine takes its time to start the kernel worker
PROMPT_TOKENS = 2000
STREAM_TOKENS = 3584
WINDOW_TOKENS = 508
HANDED_OVER = ("all of it", "pruned by Span")  # keys of what the reader publishes
SHELF_S = 600.0  # seconds; whoever adopts it loads a model first
KEEP = 0.16  # of the prompt's tokens, under every policy


def tell(event: str, **facts: Any) -> None:
    """One line of JSON on stdout: how a worker speaks to the demo."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
