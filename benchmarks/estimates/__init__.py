"""Estimates: whether every bound is one, expected times, what an estimate costs."""
