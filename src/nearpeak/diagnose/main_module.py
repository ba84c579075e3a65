"""`MainModule`: a script or a module, run as `python FILE` or `python -m NAME` would run it."""

from __future__ import annotations

import ast
import importlib.util
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from nearpeak.capture.marked import DECORATOR, MarkedFunction
from nearpeak.errors import UsageError

_OURS = str(Path(__file__).parent.parent)
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class MainModule:
    """Code that is going to be `__main__`."""

    name: str
    """As the user gave it."""
    file: Path
    spec: ModuleSpec | None = None
    """Of a module that is found by its name."""

    def has(self, marked: MarkedFunction) -> bool:
        """Whether this is the code that a function belongs to."""
        return marked.is_in_main(self.file, None if self.spec is None else self.spec.name)

    def run(self, arguments: Sequence[str], marked: MarkedFunction | None = None) -> None:
        """Runs it with its arguments. Whatever it raises is the caller's."""
        main = ModuleType("__main__")
        loader = SourceFileLoader("__main__", str(self.file)) if self.spec is None else self.spec.loader
        main.__dict__.update(
            __file__=str(self.file),
            __cached__=None if self.spec is None else self.spec.cached,
            __loader__=loader,
            __package__=None if self.spec is None else self.spec.parent,
            __spec__=self.spec,
            __builtins__=__builtins__,
        )
        source = self.file.read_bytes()
        program: Any = source
        if marked is not None and self.has(marked):
            program = ast.parse(source, str(self.file))
            marked.decorate(program)
            main.__dict__[DECORATOR] = marked.mark
        code = compile(program, str(self.file), "exec", dont_inherit=True)
        with _as_main(main, [self.name if self.spec is None else str(self.file), *arguments]):
            threads = set(threading.enumerate())
            exec(code, main.__dict__)
            for thread in set(threading.enumerate()) - threads:  # the interpreter waits for them too
                if not thread.daemon:
                    thread.join()


def script(path: str | Path) -> MainModule:
    """The script at `path`."""
    file = Path(path)
    if file.is_dir():
        file = file / "__main__.py"
    if not file.is_file():
        raise UsageError(f"{path}: there is no such script.")
    return MainModule(name=str(path), file=file.absolute())


def module(name: str) -> MainModule:
    """The module `name`, found as `python -m` finds it; of a package its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}.") from None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file() or not spec.origin.endswith(".py"):
        raise UsageError(f"-m {name}: there is no module of this name with a source file (from {Path.cwd()}).")
    return MainModule(name=name, file=Path(spec.origin), spec=spec)


@contextmanager
def path_of(folder: Path) -> Iterator[None]:
    """Inside, modules are looked for in `folder` first, in the place of the folder of our own command."""
    before = list(sys.path)
    if not sys.flags.safe_path:
        sys.path[0:1] = [str(folder)]
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _as_main(main: ModuleType, argv: list[str]) -> Iterator[None]:
    """Inside, `main` is the main module: what is pickled, and what worker processes import, is looked for there."""
    before = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = main, argv
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = before


def exit_code_of(error: BaseException) -> int:
    """What the interpreter ends with after this error, which is printed as the interpreter would print it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, _below_ours(error.__traceback__))
    else:
        shown = traceback.TracebackException.from_exception(error)
        _without_ours(shown)
        print("".join(shown.format()), end="", file=sys.stderr)
    return 1


def _below_ours(found: TracebackType | None) -> TracebackType | None:
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_OURS):
        found = found.tb_next
    return found


def _without_ours(shown: traceback.TracebackException | None) -> None:
    """Removes the frames of this package, here and in the errors behind it."""
    while shown is not None:
        kept = [frame for frame in shown.stack or () if not frame.filename.startswith(_OURS)]
        shown.stack = traceback.StackSummary.from_list(kept) if kept else None  # type: ignore[assignment]
        if shown.__cause__ is not None:
            _without_ours(shown.__cause__)
        shown = shown.__context__
