"""`python -m drafter <command>`: one subcommand per module, each with its own `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import sys

from drafter import calibration, evaluate, experiment, inspection, speculators, synthesize, train

COMMANDS = {
    "synthesize": (synthesize, "let the target write training data"),
    "train": (train, "fit a drafter to the target on its own responses"),
    "calibrate": (calibration, "fit the confidence (STS) on held-out prompts"),
    "evaluate": (evaluate, "accepted length, acceptance by position, calibration error"),
    "experiment": (experiment, "the paper's tables and figures on your target"),
    "inspect": (inspection, "what a checkpoint holds, and whether it fits its target"),
    "convert": (speculators, "to the speculators format, or from it"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m drafter",
        description="Train and measure a DSpark drafter.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=16),
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except ValueError as error:  # the user's to mend: say it without a traceback
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
