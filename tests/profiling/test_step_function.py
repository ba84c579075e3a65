import ast

import pytest

from nearpeak.errors import UsageError
from nearpeak.profiling.script import STEP_DECORATOR, StepFunction

SOURCE = """\
import functools

def plain(): return "plain"

if True:
    class Holder:
        @functools.cache
        def kept(self): return "kept"

    async def waits(): pass
else:
    try: pass
    except ValueError:
        def never(): pass

def outer():
    def inner(): return "inner"
    return inner()
"""


@pytest.mark.parametrize("name", ["plain", "Holder.kept", "outer.inner", "waits", "never"])
def test_a_function_is_decorated_where_it_is_defined_and_keeps_its_lines(name):
    tree = ast.parse(SOURCE)
    marked = StepFunction(f"__main__:{name}", lambda function: function)
    marked.decorate(tree)
    assert marked.is_wrapped
    before, after = (
        [node.lineno for node in ast.walk(parsed) if isinstance(node, ast.stmt)] for parsed in (ast.parse(SOURCE), tree)
    )
    assert before == after
    seen = []

    def note(function):
        seen.append((getattr(function, "__qualname__", function), getattr(function, "__code__", None)))
        return function

    space = {STEP_DECORATOR: note}
    exec(compile(tree, "x.py", "exec", dont_inherit=True), space)
    if name == "outer.inner":
        assert space["outer"]() == "inner"
    assert len(seen) == (name != "never")
    if name == "plain":
        assert seen[0][1].co_firstlineno == 3


@pytest.mark.parametrize("reference", ["plain", ":plain", "module:", "module:1x", "module:a..b"])
def test_what_names_no_function_is_said(reference):
    with pytest.raises(UsageError, match="Write MODULE:FUNCTION"):
        StepFunction(reference, lambda function: function)


def test_an_unknown_function_is_said_with_those_that_are_there():
    with pytest.raises(UsageError, match=r"It has Holder\.kept, never, outer, outer\.inner, plain, waits\."):
        StepFunction("__main__:zzz", lambda function: function).decorate(ast.parse(SOURCE))
    with pytest.raises(UsageError, match="has no functions"):
        StepFunction("__main__:zzz", lambda function: function).decorate(ast.parse("x = 3"))
