"""The operations, one module each: its reference, its operators, the function and the module that users call.

They are in a package of their own because a module `nearpeak.kernels.add` would take the place of the function.
"""
