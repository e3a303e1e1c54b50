"""One document per command: for people, as JSON or as YAML. Data goes to stdout, the rest to stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd import streams
from kvd.errors import InvalidArgumentError, KvdError
from kvd.streams import say
from kvd_client.cli.screen import Screen, Table

FORMATS = ("table", "json", "yaml")

Document = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """Where a command's answer goes."""

    format: str
    screen: Screen

    @classmethod
    def to_stdout(cls, chosen: str) -> "Output":
        """Raises InvalidArgumentError if YAML is wanted and PyYAML is not there."""
        if chosen == "yaml":
            _yaml()
        return cls(chosen, Screen.of(sys.stdout))

    def show(self, document: Document, lines: Sequence[str]) -> None:
        """`document` for programs, `lines` for people."""
        if self.format == "json":
            say(json.dumps(document, indent=2) + "\n")
        elif self.format == "yaml":
            say(_yaml().safe_dump(document, sort_keys=False))
        else:
            say("".join(f"{line}\n" for line in lines))

    def show_list(
        self, noun: str, rows: Sequence[Document], table: Table, failures: Mapping[str, KvdError]
    ) -> int:
        """The rows, then what failed. The exit status: 1 if a device failed."""
        errors = [error_record(device, error) for device, error in failures.items()]
        self.show({noun: list(rows), "errors": errors}, table.lines(rows, self.screen) if rows else [])
        if not rows and not failures and self.format == "table":
            note(f"no {noun}")
        for error in errors:
            complain(f"{error['device']}: {error['message']}")
        return 1 if errors else 0


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise InvalidArgumentError(
            "YAML output needs PyYAML: pip install 'kvd-pool[cli]', or use -o json"
        ) from None
    return yaml


def complain(text: str, kind: str = "error", style: str = "red") -> None:
    """A line to stderr."""
    streams.complain(f"{Screen.of(sys.stderr).paint(f'{kind}:', 'bold', style)} {text}")


def note(text: str) -> None:
    """Something a person should know that is no data."""
    complain(text, "note", "cyan")


def error_record(device: str, error: KvdError) -> Document:
    return {"device": device, "reason": error.reason, "message": str(error)}
