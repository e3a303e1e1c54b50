"""`kvctl` (also `kvdctl`): what operators see and do.

Exit status: 0 done, 1 it failed or a device does not serve, 2 it was asked wrongly.
"""

import os
import sys
from collections.abc import Sequence

from kvd.errors import InvalidArgumentError, KvdError
from kvd_client.cli.output import Output, complain
from kvd_client.cli.parser import build_parser

DONE, FAILED, WRONG = 0, 1, 2
INTERRUPTED = 130  # what a shell makes of SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; never raises KvdError."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args, Output.to_stdout(args.output))
        sys.stdout.flush()
    except InvalidArgumentError as error:
        complain(str(error))
        return WRONG
    except KvdError as error:
        complain(str(error))
        return FAILED
    except BrokenPipeError:
        # The reader has seen enough; what is still buffered must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
