"""The command `nearpeak`: finds the verb, runs it, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import NoReturn, Protocol

from nearpeak import __version__
from nearpeak._display import printable
from nearpeak._stage_times import TIMES
from nearpeak.cli.output import Streams, narrate, narrate_text
from nearpeak.cli.verbs import (
    bench,
    comm,
    diff,
    doctor,
    estimate,
    fix,
    gallery,
    judge,
    machine,
    plan,
    profile,
    report,
)
from nearpeak.errors import (
    EXIT_INTERRUPTED,
    EnvironmentProblem,
    NearpeakError,
    UsageError,
    did_you_mean,
    message_of,
)


class Verb(Protocol):
    """What the module of a verb has."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code."""


VERBS: dict[str, Verb] = {
    "machine": machine,
    "bench": bench,
    "judge": judge,
    "estimate": estimate,
    "profile": profile,
    "report": report,
    "diff": diff,
    "fix": fix,
    "comm": comm,
    "plan": plan,
    "gallery": gallery,
    "doctor": doctor,
}

INTERNAL_ERROR = 5
BROKEN_PIPE = 141
LONGEST_MESSAGE = 4000

EPILOG = """\
exit codes:
  0  ok
  1  a gate failed
  2  the command line or the case cannot be used as given
  3  the measurement is not trustworthy
  4  the environment is missing something
  5  an error inside of nearpeak

NEARPEAK_DEBUG=1 shows the traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process when None) and return its exit code.

    Results go to stdout. An error becomes one message on stderr and the exit code of its class; one that was not raised
    on purpose is ours. Ctrl-C is -2, by the number of its signal.
    """
    # Without NumPy, which nothing here uses, torch warns on import.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    try:
        with Streams.own():
            code = _run(argv)
            if TIMES is not None:
                narrate_text(TIMES.table())
            with suppress(ValueError):  # a script may have closed it
                if sys.stdout is not None:
                    sys.stdout.flush()
        return code
    except NearpeakError as error:
        hint = "" if error.__cause__ is None else "NEARPEAK_DEBUG=1 shows the traceback."
        return _report(error, str(error), hint, error.exit_code)
    except KeyboardInterrupt:
        narrate("nearpeak: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python flushes stdout once more at exit, which must not fail again.
        with suppress(AttributeError, OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError as error:
        return _report(error, "there is not enough memory.", "", EnvironmentProblem.exit_code)
    except SystemExit:  # of argparse, and of a process that a script forked
        raise
    except BaseException as error:
        hint = "This is an error of nearpeak: please report it. NEARPEAK_DEBUG=1 shows the traceback."
        return _report(error, f"internal error: {type(error).__name__}: {message_of(error)}", hint, INTERNAL_ERROR)


def run() -> NoReturn:
    """The command `nearpeak`: `main`, and the end of the process.

    Ctrl-C ends it by the signal, as Python itself ends: a shell then stops the script that the command is part of.
    """
    code = main()
    if code == EXIT_INTERRUPTED:
        hook = sys.excepthook

        def say_nothing(*_error: object) -> None:
            sys.excepthook = hook  # what runs at exit finds its own

        sys.excepthook = say_nothing
        raise KeyboardInterrupt
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    """Shows arguments in its errors as everything else that comes from outside."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and ends the process."""
        super().error(printable(message))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, with one sub-parser per verb."""
    parser = _Parser(
        prog="nearpeak",
        description="Measures PyTorch code, bounds it by what the hardware can do, and explains the gap.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"nearpeak {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, module in VERBS.items():
        text = (module.__doc__ or "").strip()
        verb = verbs.add_parser(
            name,
            help=text.partition("\n")[0].replace("%", "%%"),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(verb)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    _check_verb(given)
    arguments, unknown = parser.parse_known_args(given)
    if unknown:
        raise UsageError(_unknown_text(given, unknown))
    arguments.given = given
    arguments.ends_process = argv is None  # nothing but the report follows a script
    arguments.own_filter = warnings.filters[0]  # a script has it not
    if arguments.verb is None:
        parser.print_help(sys.stderr)
        return 2
    return VERBS[arguments.verb].run(arguments)


def _check_verb(given: Sequence[str]) -> None:
    """Raises UsageError for a first word that is neither a verb nor an option."""
    if not given or given[0].startswith("-") or given[0] in VERBS:
        return
    asked = given[0]
    if asked.endswith(".py"):
        raise UsageError(f"{asked!r} is no verb. To profile a script: nearpeak profile {shlex.join(given)}")
    raise UsageError(f"There is no verb {asked!r}. {did_you_mean(asked, VERBS)} `nearpeak --help` explains them.")


def _unknown_text(given: Sequence[str], unknown: Sequence[str]) -> str:
    """What is wrong with arguments that no verb knows. Options of a script belong after it."""
    verb, asked = given[0], unknown[0]
    command = f"nearpeak {verb}" if verb in VERBS else "nearpeak"
    parser = argparse.ArgumentParser()
    if verb in VERBS:
        VERBS[verb].configure(parser)
    near = get_close_matches(asked.partition("=")[0], parser._option_string_actions, n=1)
    help_text = f"`{command} --help` explains what it takes."
    if not asked.startswith("-"):
        return f"{command} does not take {asked!r}. {help_text}"
    script = next((position for position, word in enumerate(given) if word.endswith(".py")), None)
    if verb in ("profile", "fix") and script is not None and given.index(asked) < script:
        first = given.index(asked)
        moved = [*given[:first], given[script], *given[first:script], *given[script + 1 :]]
        nearest = f" The nearest option of nearpeak is {near[0]}." if near else ""
        return (
            f"{command} has no option {asked}. Options of the script go after it: nearpeak {shlex.join(moved)}\n"
            f"Options of nearpeak go before it.{nearest} {help_text}"
        )
    guess = f"Did you mean {near[0]}? " if near else ""
    return f"{command} has no option {asked}. {guess}{help_text}"


def _report(error: BaseException, message: str, hint: str, code: int) -> int:
    if os.environ.get("NEARPEAK_DEBUG", "0") not in ("", "0"):
        import traceback

        narrate("".join(traceback.format_exception(error)).rstrip())
        return code
    narrate(f"nearpeak: {message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + '...'}")
    if hint:
        narrate(hint)
    return code
