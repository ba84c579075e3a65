"""The command line: one module per verb, thin over the library.

The docstring of a verb's module is its help, `configure(parser)` declares its arguments, and `run(arguments)` does it
and returns the exit code. A verb imports what it needs inside `run`, so that `nearpeak --help` stays fast.
"""
