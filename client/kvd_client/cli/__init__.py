"""`kvctl` (also `kvdctl`): what operators see and do.

Exit status: 0 done, 1 it failed or a device does not serve, 2 it was asked wrongly.
"""

from collections.abc import Sequence

from kvd.errors import InvalidArgumentError, KvdError
from kvd.streams import StdoutError, have_standard_streams
from kvd_client.cli.output import Output, complain
from kvd_client.cli.parser import build_parser

DONE, FAILED, WRONG = 0, 1, 2
INTERRUPTED = 130  # what a shell makes of SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; never raises KvdError."""
    have_standard_streams()
    try:
        args = build_parser().parse_args(argv)
        status: int = args.run(args, Output.to_stdout(args.output))
    except InvalidArgumentError as error:
        complain(str(error))
        return WRONG
    except (KvdError, StdoutError) as error:
        complain(str(error))
        return FAILED
    except BrokenPipeError:  # the reader has seen enough
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
