"""What the phase scripts share: ranks, inputs, launches, the comparison of views, cases and their record."""
