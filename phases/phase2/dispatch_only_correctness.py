"""Phase 2: the pool that dispatch leaves on every rank, exactly: rows, scales, weights, counts, origins, arrival."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phases.support.numeric import numeric_variants
from phases.support.runner import run_phase

if __name__ == "__main__":
    sys.exit(run_phase(Path(__file__).resolve().parent, numeric_variants))
