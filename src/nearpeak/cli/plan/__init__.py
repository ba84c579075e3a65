"""The questions of `nearpeak plan`, one module each."""
