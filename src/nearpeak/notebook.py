"""nearpeak in a notebook: `%load_ext nearpeak` registers the magics, `progress` shows lines that update in place.

Results show themselves by `_repr_html_`, with or without the extension. IPython is not a dependency: it is imported
with the extension, when IPython itself asks for it.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NoReturn, get_args

from nearpeak._display import printable
from nearpeak.bound.roofline import Ceilings
from nearpeak.errors import NearpeakError, UsageError, did_you_mean
from nearpeak.render.html.markup import element, visible
from nearpeak.render.results import VIEWS


@contextmanager
def progress(shell: Any = None) -> Iterator[Callable[[str], None]]:
    """A function to pass as `progress` to `nearpeak.profile` or `nearpeak.bench`.

    In a notebook each line replaces the one before it, and the last one disappears when the block ends, also by an
    error. Anywhere else lines go to stderr, as on the command line.

    >>> with progress() as say:
    ...     say("warming up")
    """
    if shell is None and "IPython" in sys.modules:  # a shell has imported it
        shell = sys.modules["IPython"].get_ipython()
    if getattr(shell, "kernel", None) is None:  # a terminal, or no IPython at all
        yield _print_stderr
        return
    line = _StatusLine()
    try:
        yield line.say
    finally:
        line.clear()


def _print_stderr(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


class _StatusLine:
    """One line of a cell's output that is replaced. It is created with the first text: no text leaves no empty line."""

    def __init__(self) -> None:
        self._handle: Any = None

    def say(self, line: str) -> None:
        """Replaces the line."""
        text = visible(line)
        html = element("div", text, style="opacity:.75")
        self._show({"text/plain": text, "text/html": str(html)})

    def clear(self) -> None:
        """Empties the line."""
        if self._handle is not None:
            self._show({"text/plain": "", "text/html": ""})

    def _show(self, contents: dict[str, str]) -> None:
        if self._handle is None:
            display = import_module("IPython.display").display  # not a dependency; a kernel has it
            self._handle = display(contents, raw=True, display_id=True)
        else:
            self._handle.update(contents, raw=True)


HELP = """Profile the steps of code: where their time goes, and what the hardware allows. With --bench, time it.

    %nearpeak [options] CODE          a line
    p = %nearpeak [options] CODE      a line, its result in p
    %%nearpeak [options]              a cell

Code with a loop runs once, and its steps are detected as in a script: a step ends with an optimizer's step, or with a
module's call without gradients. A profile needs about twenty-five of them. Code that is one step itself, with one step
of an optimizer or none and no module called twice beside it, runs about twenty times. With --bench, code runs until
the interval is narrow. Variables that it assigns keep their values, as in any cell. The result is a nearpeak.Profile,
or a nearpeak.Timing with --bench.

    --repeat            the code is one step, whatever it does: run it about twenty times; not with --bench
    --bench             time it, as nearpeak.bench does
    --on NAME           the machine of the catalogue to compute bounds for (this one); not with --bench
    --ceilings WHICH    achievable or theoretical (achievable); not with --bench
    --max-seconds S     with --bench: stop after this long (2)
    --into NAME         also assign the result to this variable
    --quiet             no progress
"""
_WITHOUT_VALUE = ("--bench", "--repeat", "--quiet")
_WITH_VALUE = ("--on", "--ceilings", "--max-seconds", "--into")


@dataclass(frozen=True, slots=True, kw_only=True)
class MagicOptions:
    """The options of a magic, and the code that follows them on its line."""

    code: str
    verb: Literal["profile", "bench"] = "profile"
    on: str | None = None
    ceilings: Ceilings = "achievable"
    max_seconds: float | None = None
    into: str | None = None
    repeat: bool = False
    quiet: bool = False


def parse_magic(line: str) -> MagicOptions:
    """Reads the options at the beginning of a line; the rest is code.

    >>> options = parse_magic("--bench --into t torch.mm(a,  -b)")
    >>> options.verb, options.into, options.code
    ('bench', 't', 'torch.mm(a,  -b)')
    """
    values: dict[str, str] = {}
    rest = line.strip()
    while rest.startswith("--"):
        name, rest = _first_word(rest)
        if name == "--":
            break
        name, equals, value = name.partition("=")
        if name in _WITH_VALUE:
            if not equals:
                value, rest = _first_word(rest)
            if not value:
                raise UsageError(f"{name} needs a value: %nearpeak? shows the options.")
        elif name not in _WITHOUT_VALUE or equals:
            raise UsageError(f"%nearpeak has no option {name!r}. {did_you_mean(name, (*_WITHOUT_VALUE, *_WITH_VALUE))}")
        values[name] = value
    return _check_options(values, rest)


def _first_word(text: str) -> tuple[str, str]:
    """The first word, and what follows."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return word, text.strip()[len(word) :].strip()


def _check_options(values: dict[str, str], code: str) -> MagicOptions:
    bench = "--bench" in values
    for name in ("--on", "--ceilings", "--repeat") if bench else ("--max-seconds",):
        if name in values:
            raise UsageError(f"{name} is {'not for' if bench else 'for'} --bench.")
    ceilings = values.get("--ceilings", "achievable")
    if ceilings not in get_args(Ceilings):
        raise UsageError(f"--ceilings {ceilings}: {did_you_mean(ceilings, get_args(Ceilings))}")
    into = values.get("--into")
    if into is not None and not into.isidentifier():
        raise UsageError(f"--into {into}: that is no name of a variable.")
    return MagicOptions(
        code=code,
        verb="bench" if bench else "profile",
        on=values.get("--on"),
        ceilings="theoretical" if ceilings == "theoretical" else "achievable",
        max_seconds=_seconds(values.get("--max-seconds")),
        into=into,
        repeat="--repeat" in values,
        quiet="--quiet" in values,
    )


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise UsageError(f"--max-seconds {text}: seconds are a number above 0.")
    return number


class Magics:
    """The two magics of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def line(self, line: str) -> Any:
        """See `HELP`."""
        return self._run(line, "")

    def cell(self, line: str, cell: str) -> Any:
        """See `HELP`."""
        return self._run(line, cell)

    line.__doc__ = cell.__doc__ = HELP

    def _run(self, line: str, cell: str) -> Any:
        try:
            options = parse_magic(line)
            if cell and options.code:
                raise UsageError(f"%%nearpeak takes its code from the cell, and got {options.code!r} on its line.")
            # The line of the magic is the cell's first: with it, lines have the numbers that the notebook shows.
            function = self._function(cell or options.code, first_line=2 if cell else 1)
            result = self._measure(options, function)
        except NearpeakError as error:
            _raise_usage_error(str(error))
        if options.into is not None:
            self._shell.user_ns[options.into] = result
        return result

    def _measure(self, options: MagicOptions, function: Callable[[], None]) -> Any:
        with progress(self._shell) as say:
            narrate = None if options.quiet else say
            if options.verb == "bench":
                from nearpeak.measure.bench import bench  # imports torch

                limits: dict[str, Any] = {} if options.max_seconds is None else {"max_seconds": options.max_seconds}
                return bench(function, progress=narrate, **limits)
            from nearpeak.profiling.run import ProfiledBlock, profile

            if not options.repeat:
                block = ProfiledBlock(
                    on=options.on, ceilings=options.ceilings, progress=narrate, name=function.__name__
                )
                with block:
                    function()
                if not block.is_one_step:
                    return _profile_of_loop(block)
            return profile(function, on=options.on, ceilings=options.ceilings, progress=narrate)

    def _function(self, source: str, *, first_line: int) -> Callable[[], None]:
        """The code as a function without arguments, which uses the notebook's variables."""
        if not source.strip():
            raise UsageError("There is no code to run: write it after %nearpeak, or below %%nearpeak.")
        shell = self._shell
        # IPython drops empty lines at the beginning.
        before = first_line - 1 + len(source) - len(source.lstrip("\n"))
        python = "\n" * before + shell.transform_cell(source)
        name = f"cell {shell.displayhook.prompt_count}"
        # Tracebacks read lines from here; an entry without a modification time is never dropped as out of date.
        linecache.cache[name] = len(python), None, python.splitlines(keepends=True), name
        code = compile(python, name, "exec", flags=shell.compile.flags, dont_inherit=True)
        names = shell.user_ns

        def cell() -> None:
            exec(code, names)

        cell.__name__ = cell.__qualname__ = name  # the name in reports
        return cell


def _profile_of_loop(block: Any) -> Any:
    """The profile of a block of several steps, which is not run again: it would change the model once more."""
    try:
        return block.profile
    except UsageError as error:
        raise UsageError(
            f"{error} The code ran once, and is not run again. If all of it is one step, --repeat runs it about twenty "
            "times."
        ) from None


def _raise_usage_error(message: str) -> NoReturn:
    """Raises IPython's own error for magics, which is shown as one line without a traceback."""
    raise import_module("IPython.core.error").UsageError(printable(message)) from None


def _print_report(result: Any, printer: Any, cycle: bool) -> None:
    """IPython's protocol of a printer."""
    printer.text(result.report())


__all__ = ["load_ipython_extension", "progress"]


def load_ipython_extension(shell: Any) -> None:
    """Registers `%nearpeak` and `%%nearpeak`, and how results are shown where there is only text."""
    magics = Magics(shell)
    shell.register_magic_function(magics.line, magic_kind="line", magic_name="nearpeak")
    shell.register_magic_function(magics.cell, magic_kind="cell", magic_name="nearpeak")
    formatter = shell.display_formatter.formatters["text/plain"]
    for module, name in VIEWS:
        formatter.for_type_by_name(f"nearpeak.{module}", name, _print_report)
