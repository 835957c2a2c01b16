"""Runs the phases in order, stops what hangs, leaves nothing behind, and says what happened.

``python -m harness`` is the way in. The folder knows nothing of the layer itself: it starts phase scripts,
reads the records that they write, and asks a target to build itself.
"""
