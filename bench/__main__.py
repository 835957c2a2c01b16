"""``python -m bench``: lists the benchmarks; ``python -m bench moe --help`` says what one takes."""

from __future__ import annotations

import sys

USAGE = """usage: python -m bench moe [options]
       python -m bench table FILE.json ...

  moe     the whole layer, alone or under torchrun, beside a baseline of torch and NCCL and an installed peer
          (python -m bench moe --help)
  table   what runs have left in their files, with the ratios to the peer
"""


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["moe"]:
        from bench import moe

        return moe.main(words[1:])
    if words[:1] == ["table"]:
        from bench import table

        return table.main(words[1:])
    asked_for_help = words[:1] in ([], ["-h"], ["--help"])
    print(USAGE, end="", file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


if __name__ == "__main__":
    sys.exit(main())
