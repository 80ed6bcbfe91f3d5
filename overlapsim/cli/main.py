"""The entry point: a group whose commands are imported only when they are called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from overlapsim import __version__
from overlapsim.errors import OverlapSimError

# Name -> (module, one line of help): `--help` must import none of them.
COMMANDS: Final = {
    "operator": ("overlapsim.cli.operator", "Plan how one GEMM overlaps with its collective."),
    "crossover": ("overlapsim.cli.crossover", "Find the row count from which overlap pays."),
    "plan": ("overlapsim.cli.plan", "Plan a training step: layouts, strategies and schedules, ranked and explained."),
    "simulate": ("overlapsim.cli.simulate", "Simulate a training step: its time, where it goes, memory of each GPU."),
    "sweep": ("overlapsim.cli.sweep", "Ask plan, simulate or operator for many points; resume where it was killed."),
    "emit": ("overlapsim.cli.emit", "Write a plan as settings of frameworks; check the settings you have."),
    "trace": ("overlapsim.cli.trace", "Simulate a plan file again; write its trace or plot."),
    "calibrate": ("overlapsim.cli.calibrate", "Turn measurements into a profile of your machine."),
    "compare": ("overlapsim.cli.compare", "Hold a measured file against the prediction."),
    "accuracy": ("overlapsim.cli.accuracy", "Score predictions against measurements, by group and regime."),
    "profiles": ("overlapsim.cli.profiles", "List, show and check hardware profiles."),
    "models": ("overlapsim.cli.models", "List and show models: parameters and FLOP of presets and config.json files."),
    "strategies": ("overlapsim.cli.strategies", "List and show overlap strategies."),
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is run, not when help is shown.

    Parameters
    ----------
    modules : name -> (module with `command`, one line of help), in the order of the workflow
    """

    def __init__(self, *args: Any, modules: Mapping[str, tuple[str, str]] = COMMANDS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return command names in the order of the workflow."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, or None where it is unknown."""
        if cmd_name not in self._modules:
            return None
        command = importlib.import_module(self._modules[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._modules.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the known commands when an unknown one is called."""
        if args and not args[0].startswith("-") and args[0] not in self._modules:
            ctx.fail(f"command {args[0]!r} is unknown; expected one of {', '.join(self._modules)}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="overlapsim")
def cli() -> None:
    """Predict and plan how computation and communication overlap on multi-GPU machines."""


# Raised for a group without a command; older versions of click print the help themselves.
_NO_ARGUMENTS: Final[Any] = getattr(click.exceptions, "NoArgsIsHelpError", ())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(cli, "overlapsim", arguments)


def run(group: click.Group, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a group of commands; errors of ours become one line on stderr and their exit code."""
    try:
        given = None if arguments is None else list(arguments)
        code = group.main(args=given, prog_name=name, standalone_mode=False)
    except OverlapSimError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except _NO_ARGUMENTS as help_:
        click.echo(help_.format_message())
        return
    except click.Abort:
        click.echo("error: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)
    except SystemExit:
        # click ends a closed pipe with exit code 1, which would say "no feasible plan", and wraps stdout before.
        if type(sys.stdout).__name__ != "_PacifyFlushWrapper":
            raise
        sys.exit(0)
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`): nobody is left to tell.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        click.echo(
            f"error: {error.filename or 'output'}: {error.strerror or error}; check the path and the disk", err=True
        )
        sys.exit(2)
    except MemoryError:
        click.echo("error: not enough memory for a problem of this size; give a smaller one", err=True)
        sys.exit(2)
    # Without its standalone mode click returns the code of an Exit; commands return None.
    if isinstance(code, int) and code:
        sys.exit(code)


if __name__ == "__main__":
    main()
