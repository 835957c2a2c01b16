"""Phase 4: what the L1 epilogue stores: SwiGLU times the route's weight as fp8 with scales, and the readiness mask."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phases.support.numeric import activation_clamp_variants, numeric_variants
from phases.support.runner import CaseList, Phase, main


def make_cases(phase: Phase) -> CaseList:
    return {**numeric_variants(phase), "activation_clamp": activation_clamp_variants(phase)}


if __name__ == "__main__":
    main(__file__, make_cases)
