"""Findings, comparisons of runs, the scatter of kernel times, and reading trace files."""
