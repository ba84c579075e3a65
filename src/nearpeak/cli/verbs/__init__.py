"""One module per verb of `nearpeak`.

The docstring of a verb's module is its help, `configure(parser)` declares its arguments, and `run(arguments)` runs it
and returns the exit code. A verb imports what it needs inside `run`, so that `nearpeak --help` stays fast.
"""
