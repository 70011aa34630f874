"""``python -m npattn``: parses the arguments and calls the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from npattn import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line; that of the process by default.

    Returns
    -------
    int
        The exit status: 0, 1 if a check fails, 2 for arguments or files that cannot be used, 130 after an interrupt.
    """
    from npattn._commands import bench, cases, check, demo, explore

    parser = argparse.ArgumentParser(prog="python -m npattn", description="Attention without a framework.")
    parser.add_argument("--version", action="version", version=f"npattn {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, summary in (
        ("demo", demo, "train a small attention model on real text, in under 30 seconds, and look at what it learned"),
        ("explore", explore, "make a page on which attention and its gradients can be seen, down to every product and sum"),
        ("check", check, "find out whether npattn computes correctly on this machine: numbers of others, laws, gradients"),
        ("cases", cases, "write problems with float64 answers for tests in any language, or verify a folder of answers"),
        ("bench", bench, "measure npattn beside the naive formula, PyTorch and JAX: time, share of the limit, memory"),
    ):
        sub = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has left, as head does
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
