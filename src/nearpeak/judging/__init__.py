"""The referee for kernels: is a candidate right, is it honest, how fast is it, and how near the limit.

`judge` holds the reference, the inputs and the answers in this process; `runner` runs the candidate in another one.
"""
