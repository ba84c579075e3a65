"""`StepFunction`: a function that the user named as the step, wrapped when it is defined.

A function of the script itself is decorated in its syntax tree, on its own lines. A function of a module is replaced
when that module was imported, before anyone else can take it from there.
"""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from nearpeak.errors import UsageError, did_you_mean

STEP_DECORATOR = "__nearpeak_step__"
MAX_LISTED_NAMES = 30


class StepFunction:
    """The function of a reference MODULE:FUNCTION, FILE.py:FUNCTION, or __main__:FUNCTION; a method is CLASS.METHOD.

    `wrap` makes the function that replaces it.
    """

    def __init__(self, reference: str, wrap: Callable[[Any], Any]) -> None:
        self.reference = reference
        self.place, separator, self.name = reference.rpartition(":")
        if not separator or not self.place or not all(part.isidentifier() for part in self.name.split(".")):
            raise UsageError(
                f"Cannot read {reference!r} as a function. Write MODULE:FUNCTION, FILE.py:FUNCTION, or "
                "__main__:FUNCTION for one of the script itself; a method is CLASS.METHOD."
            )
        self._file = Path(self.place).resolve() if self.place.endswith(".py") else None
        if self._file is not None and not self._file.is_file():
            raise UsageError(f"{reference}: there is no file {self.place!r} (from {Path.cwd()}).")
        self.wrap = wrap
        self.is_wrapped = False

    def is_in_main(self, file: Path, module: str | None) -> bool:
        """Whether it is a function of the code that runs as `__main__`."""
        return self.place == "__main__" or self.place == module or self._file == file.resolve()

    def decorate(self, tree: ast.Module) -> None:
        """Decorates the function in a syntax tree, whose namespace then needs `STEP_DECORATOR`."""
        functions = dict(_functions_in_tree(tree.body, ""))
        function = functions.get(self.name)
        if function is None:
            raise self._unknown(functions)
        decorator = ast.Name(id=STEP_DECORATOR, ctx=ast.Load())
        function.decorator_list.insert(
            0, ast.copy_location(decorator, function.decorator_list[0] if function.decorator_list else function)
        )
        self.is_wrapped = True

    @contextmanager
    def in_modules(self) -> Iterator[None]:
        """Inside, the function is wrapped in its module: now if that is imported already, else on import."""
        for name, module in list(sys.modules.items()):
            if self.is_home(name, getattr(module, "__file__", None)):
                self.wrap_in(module)
        sys.meta_path.insert(0, finder := _ImportHook(self))
        try:
            yield
        finally:
            sys.meta_path.remove(finder)

    def is_home(self, name: str, file: str | None) -> bool:
        """Whether a module defines the function."""
        return name == self.place or (
            self._file is not None and name != "__main__" and file is not None and Path(file).resolve() == self._file
        )

    def wrap_in(self, module: ModuleType) -> None:
        """Replaces the function in its module."""
        owner: Any = module
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        function = inspect.getattr_static(owner, name, None)
        if not (callable(function) or isinstance(function, (staticmethod, classmethod))):
            raise self._unknown(dict(_functions_in_module(module)))
        if not self.is_wrapped:
            setattr(owner, name, self.wrap(function))
            self.is_wrapped = True

    def _unknown(self, functions: dict[str, Any]) -> UsageError:
        if not functions:
            return UsageError(f"--step {self.reference}: {self.place} has no functions.")
        names = sorted(functions)
        hint = did_you_mean(self.name, names)
        if hint.startswith("Valid"):
            more = f", and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
            hint = f"It has {', '.join(names[:MAX_LISTED_NAMES])}{more}."
        return UsageError(f"--step {self.reference}: {self.place} has no function {self.name!r}. {hint}")


class _ImportHook:
    """An import finder that delegates to the others, and wraps the function after its module was executed."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module spec of another finder."""
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None
            if finder is not self and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                if self._function.is_home(name, spec.origin):
                    self._wrap_after(spec.loader)
                return spec
        return None

    def _wrap_after(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            self._function.wrap_in(module)

        loader.exec_module = exec_module


def _functions_in_tree(
    body: Sequence[ast.AST], prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions below some statements, by name: of classes and of other functions as OUTER.INNER."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _functions_in_tree(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _functions_in_tree(list(ast.iter_child_nodes(node)), prefix)


def _functions_in_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and methods that a module defines itself."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            methods = inspect.getmembers_static(
                value, lambda part: isinstance(part, (staticmethod, classmethod, FunctionType))
            )
            yield from ((f"{name}.{key}", method) for key, method in methods if key in vars(value))
