"""What all operations share: torch operators with an eager fast path, the choice between kernel and reference, recorded
calls, tuning tables, launching Triton kernels, and building blocks of kernels.

Importing the package imports nothing. `operator`, `policy`, `replay` and `tuning` need torch; the others need Triton.
"""
