"""nearpeak in a notebook: `%load_ext nearpeak` registers the magics, `progress` shows lines that update in place.

Results show themselves by `_repr_html_`, with or without the extension. IPython is not a dependency: it is imported
with the extension, when IPython itself asks for it.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NoReturn, get_args

from nearpeak.bound.roofline import Ceilings
from nearpeak.errors import NearpeakError, UsageError, did_you_mean
from nearpeak.render.html.markup import element, visible


@contextmanager
def progress(shell: Any = None) -> Iterator[Callable[[str], None]]:
    """What to pass as `progress` to `nearpeak.profile` or `nearpeak.bench`.

    In a notebook each line takes the place of the one before, in one place of the output, which is empty when the block
    ends, also by an error. Anywhere else lines go to stderr, as on the command line.

    >>> with progress() as say:
    ...     say("warming up")
    """
    if shell is None and "IPython" in sys.modules:  # which has been imported wherever there is a shell
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
    print(line, file=sys.stderr, flush=True)


class _StatusLine:
    """One place of a cell's output. It is made with the first line, so that nothing is left where none came."""

    def __init__(self) -> None:
        self._handle: Any = None

    def say(self, line: str) -> None:
        """Shows a line in the place of the last one."""
        text = visible(line)
        shown = element("div", text, style="opacity:.75")
        self._show({"text/plain": text, "text/html": str(shown)})

    def clear(self) -> None:
        """Leaves an empty place."""
        if self._handle is not None:
            self._show({"text/plain": "", "text/html": ""})

    def _show(self, forms: dict[str, str]) -> None:
        if self._handle is None:
            display = import_module("IPython.display").display  # no dependency, and there where a kernel is
            self._handle = display(forms, raw=True, display_id=True)
        else:
            self._handle.update(forms, raw=True)


HELP = """Profiles code as one step: where its time goes, and what the hardware allows. With --bench its time alone.

    %nearpeak [options] CODE          a line
    p = %nearpeak [options] CODE      a line, its result in p
    %%nearpeak [options]              a cell

The code runs many times: some fifteen for a profile, as often as it takes for a time. What it assigns stays, as in any
cell. The result is a nearpeak.Profile, or a nearpeak.Timing with --bench.

    --bench             time it, as nearpeak.bench does
    --on NAME           a machine of the catalogue whose bounds count (this one); not with --bench
    --ceilings WHICH    achievable or theoretical (achievable); not with --bench
    --max-seconds S     with --bench: stop after this long (2)
    --into NAME         also assign the result to this variable
    --quiet             no progress
"""
_WITHOUT_VALUE = ("--bench", "--quiet")
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
    quiet: bool = False


def parse_magic(line: str) -> MagicOptions:
    """Reads the options at the beginning of a line; what follows is code, and stays as it is.

    >>> asked = parse_magic("--bench --into t torch.mm(a,  -b)")
    >>> asked.verb, asked.into, asked.code
    ('bench', 't', 'torch.mm(a,  -b)')
    """
    given: dict[str, str] = {}
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
        given[name] = value
    return _check_options(given, rest)


def _first_word(text: str) -> tuple[str, str]:
    """The first word, and what follows."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return word, text.strip()[len(word) :].strip()


def _check_options(given: dict[str, str], code: str) -> MagicOptions:
    bench = "--bench" in given
    for name in ("--on", "--ceilings") if bench else ("--max-seconds",):
        if name in given:
            raise UsageError(f"{name} is {'not for' if bench else 'for'} --bench.")
    ceilings = given.get("--ceilings", "achievable")
    if ceilings not in get_args(Ceilings):
        raise UsageError(f"--ceilings {ceilings}: {did_you_mean(ceilings, get_args(Ceilings))}")
    into = given.get("--into")
    if into is not None and not into.isidentifier():
        raise UsageError(f"--into {into}: that is no name of a variable.")
    return MagicOptions(
        code=code,
        verb="bench" if bench else "profile",
        on=given.get("--on"),
        ceilings="theoretical" if ceilings == "theoretical" else "achievable",
        max_seconds=_seconds(given.get("--max-seconds")),
        into=into,
        quiet="--quiet" in given,
    )


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise UsageError(f"--max-seconds {text}: seconds are a number above 0.")
    return found


class Magics:
    """The two magics of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def line(self, line: str) -> Any:
        """See `HELP`."""
        return self._measured(line, "")

    def cell(self, line: str, cell: str) -> Any:
        """See `HELP`."""
        return self._measured(line, cell)

    line.__doc__ = cell.__doc__ = HELP

    def _measured(self, line: str, cell: str) -> Any:
        try:
            asked = parse_magic(line)
            if cell and asked.code:
                raise UsageError(f"%%nearpeak takes its code from the cell, and got {asked.code!r} on its line.")
            # The line of the magic is the cell's first: with it, lines have the numbers that the notebook shows.
            function = self._function(cell or asked.code, first_line=2 if cell else 1)
            result = self._measure(asked, function)
        except NearpeakError as error:
            _raise_usage_error(str(error))
        if asked.into is not None:
            self._shell.user_ns[asked.into] = result
        return result

    def _measure(self, asked: MagicOptions, function: Callable[[], None]) -> Any:
        with progress(self._shell) as say:
            told = None if asked.quiet else say
            if asked.verb == "bench":
                from nearpeak.measure.bench import bench  # with torch, which a notebook may not need before

                options: dict[str, Any] = {} if asked.max_seconds is None else {"max_seconds": asked.max_seconds}
                return bench(function, progress=told, **options)
            from nearpeak.profiling.run import profile

            return profile(function, on=asked.on, ceilings=asked.ceilings, progress=told)

    def _function(self, source: str, *, first_line: int) -> Callable[[], None]:
        """The code as a function of nothing, in the notebook's own names."""
        if not source.strip():
            raise UsageError("There is no code to run: write it after %nearpeak, or below %%nearpeak.")
        shell = self._shell
        # IPython leaves empty lines at the beginning out.
        before = first_line - 1 + len(source) - len(source.lstrip("\n"))
        python = "\n" * before + shell.transform_cell(source)
        name = f"cell {shell.displayhook.prompt_count}"
        # Where Python looks for the lines of errors; without a time of change it takes them for as good as a file.
        linecache.cache[name] = len(python), None, python.splitlines(keepends=True), name
        code = compile(python, name, "exec", flags=shell.compile.flags, dont_inherit=True)
        names = shell.user_ns

        def cell() -> None:
            exec(code, names)

        cell.__name__ = cell.__qualname__ = name  # what reports call it
        return cell


def _raise_usage_error(message: str) -> NoReturn:
    """A mistake as IPython shows those of its own magics: a line, and no traceback."""
    raise import_module("IPython.core.error").UsageError(message) from None


def _text_printer(module: str) -> Callable[[Any, Any, bool], None]:
    """A printer for IPython. What renders the text is imported with the first result."""

    def show(result: Any, printer: Any, cycle: bool) -> None:
        printer.text(import_module("nearpeak.render.text").text(import_module(module).document(result)))

    return show


TEXT_PRINTERS: Mapping[tuple[str, str], Callable[[Any, Any, bool], None]] = {
    ("nearpeak.measure.timing", "Timing"): _text_printer("nearpeak.render.views.timing"),
    ("nearpeak.bound.estimate", "Estimate"): _text_printer("nearpeak.render.views.estimate"),
    ("nearpeak.profiles.profile", "Profile"): _text_printer("nearpeak.render.views.profile"),
}
"""By the module and the name of the result's class."""

__all__ = ["load_ipython_extension", "progress"]


def load_ipython_extension(shell: Any) -> None:
    """Registers `%nearpeak` and `%%nearpeak`, and how results are shown where there is only text."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write its own starts and stops into the output
    magics = Magics(shell)
    shell.register_magic_function(magics.line, magic_kind="line", magic_name="nearpeak")
    shell.register_magic_function(magics.cell, magic_kind="cell", magic_name="nearpeak")
    formatter = shell.display_formatter.formatters["text/plain"]
    for (module, name), show in TEXT_PRINTERS.items():
        formatter.for_type_by_name(module, name, show)
