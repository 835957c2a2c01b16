"""``python -m harness``."""

import sys

try:
    from harness.cli import main
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] in ("harness", "megamoe", "phases"):
        raise
    print(f"error: {sys.executable} has no {error.name}: use .venv/bin/python, which make sets up", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    main()
