"""How commands print JSON: one form, keys in the order given."""

from __future__ import annotations

from typing import Any

import click
import msgspec


def print_json(content: Any) -> None:
    """Print `content` (builtins or dataclasses) as indented JSON on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
