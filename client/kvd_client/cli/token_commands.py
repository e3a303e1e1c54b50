"""`kvctl token new`: a secret for its bearer, and the line that makes a daemon know it."""

from argparse import Namespace

from kvd.credentials import TOKEN_NAME, new_token, token_line
from kvd.errors import InvalidArgumentError
from kvd_client.cli.output import Output

ROLES = ("operator", "read-only")


def new(args: Namespace, output: Output) -> int:
    """Raises InvalidArgumentError on a name that is none."""
    if not TOKEN_NAME.fullmatch(args.name):
        raise InvalidArgumentError(f"name {args.name!r}; 1 to 64 of [A-Za-z0-9._@-] are needed")
    token = new_token()
    line = token_line(args.name, args.role, token)
    record = {"name": args.name, "role": args.role, "token": token, "line": line}
    output.show(
        record,
        [
            token,
            "",
            "Keep it in a file of its own (mode 0600) for: kvctl --endpoint HOST:PORT --token-file FILE",
            "It is shown only now. Its line for the daemon's --token-file:",
            "",
            line,
        ],
    )
    return 0
