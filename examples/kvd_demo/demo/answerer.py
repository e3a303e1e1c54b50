"""A worker that has never seen the document: it adopts what the reader published, and answers from it."""

import sys
import time

import kvd_client
from kvd_demo.demo.pool import CALL_TIMEOUT_S, HANDED_OVER, POOL, tell
from kvd_demo.demo.question import Question


def main() -> None:
    question = Question()
    with kvd_client.connect(name="answerer", timeout=CALL_TIMEOUT_S) as client:
        pool = client.pool(POOL)
        tell("ready")
        sys.stdin.readline()
        for key in HANDED_OVER:
            started = time.monotonic()
            with pool.adopt(key) as lease:
                seconds = time.monotonic() - started
                blocks, length = int(lease.block_table.size), lease.length
                tell(
                    "answered",
                    key=key,
                    blocks=blocks,
                    length=length,
                    seconds=seconds,
                    text=question.ask(lease),
                )


if __name__ == "__main__":
    main()
