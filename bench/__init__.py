"""Timings of the layer against what the machine could do and against other ways to run it, in one process tree."""
