"""Candidates that cheat, candidates with planted bugs and honest ones, for `nearpeak judge`."""
