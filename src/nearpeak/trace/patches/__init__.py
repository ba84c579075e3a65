"""Monkeypatches of torch that hold while a trace runs, shared by all traces of the process."""
