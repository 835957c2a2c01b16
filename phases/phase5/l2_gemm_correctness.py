"""Phase 5: bf16 partial results of every route, where they lie at the source ranks, from the target's own l2_acts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phases.support.numeric import numeric_variants
from phases.support.runner import main

if __name__ == "__main__":
    main(__file__, numeric_variants)
