"""``python -m megamoe.cli``: the console script for torchrun and for a checkout that is not installed."""

from megamoe.cli import main

main()
