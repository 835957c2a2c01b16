"""What was really compared in a step, so that a script can insist that it was several experts, blocks and tiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from megamoe.config import Stage
from phases.support.launches import Launch
from phases.support.oracle import RankOracle
from phases.support.workloads import MANY_TOKENS, TILE_HEIGHTS, TILES


@dataclass
class Coverage:
    """Sets of what the comparisons of a step touched.

    Attributes:
        experts: global experts whose rows were compared.
        pool_blocks: numbers of pool blocks in use.
        expert_blocks: number of a block within its expert: above 0 where an expert has several.
        l1_tiles, l2_tiles: output tiles of a block, by number.
        window_rows, window_columns: chosen windows of L1 accumulators.
        block_m, l2_sf_granularity, hidden: of the configs.
        block_rows: rows in use in blocks of 128, as numbers that occurred.
        tokens: of single ranks.
    """

    experts: set[int] = field(default_factory=set)
    pool_blocks: set[int] = field(default_factory=set)
    expert_blocks: set[int] = field(default_factory=set)
    l1_tiles: set[int] = field(default_factory=set)
    l2_tiles: set[int] = field(default_factory=set)
    window_rows: set[int] = field(default_factory=set)
    window_columns: set[int] = field(default_factory=set)
    block_m: set[int] = field(default_factory=set)
    block_rows: set[int] = field(default_factory=set)
    l2_sf_granularity: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    tokens: set[int] = field(default_factory=set)

    def add(self, launch: Launch, oracle: RankOracle) -> None:
        """Note a launch of which one rank's views were compared."""
        config, pool = launch.config, oracle.pool
        self.tokens.add(oracle.own.num_tokens)
        if pool.num_routes == 0:
            return
        block_expert = pool.block_expert.tolist()
        self.experts |= {oracle.rank * config.experts_per_rank + expert for expert in block_expert}
        self.pool_blocks |= set(range(pool.num_blocks))
        self.expert_blocks |= {block - block_expert.index(expert) for block, expert in enumerate(block_expert)}
        if launch.stage >= Stage.L1_GEMM:
            self.l1_tiles |= set(range(config.num_l1_tiles))
        if launch.stage >= Stage.L2_GEMM:
            self.l2_tiles |= set(range(config.num_l2_tiles))
        self.block_m.add(config.block_m)
        if config.block_m == 128:
            self.block_rows |= set(pool.block_rows.tolist())
        self.l2_sf_granularity.add(config.l2_sf_granularity)
        self.hidden.add(config.hidden)

    def add_window(self, launch: Launch, oracle: RankOracle) -> None:
        if len(oracle.window_routes):
            window = launch.windows[oracle.rank]
            self.window_rows.add(window.row_block)
            self.window_columns.add(window.column_block)

    def merge(self, others: Iterable[Coverage]) -> Coverage:
        """With those of other processes."""
        merged = Coverage()
        for part in (self, *others):
            for member in fields(Coverage):
                getattr(merged, member.name).update(getattr(part, member.name))
        return merged

    def lacks(self, stage: Stage, target: str) -> list[str]:
        """What a phase of this stage has to have compared on a target and has not."""
        heights = {tiles[0] for tiles in TILES[target]}
        of_target = TILE_HEIGHTS[target]
        tile_heights = tuple(sorted({min(h for h in of_target if rows <= h) for rows in self.block_rows}))
        tokens = {0, 1, 8, 48, 192, MANY_TOKENS[target]}
        wanted = [
            (len(self.experts) >= 2, f"several experts, compared {sorted(self.experts)}"),
            (len(self.pool_blocks) >= 2, f"several pool blocks, compared {sorted(self.pool_blocks)}"),
            (max(self.expert_blocks, default=0) >= 1, "an expert with several pool blocks"),
            (self.block_m == heights, f"BLOCK_M {sorted(heights)}, compared {sorted(self.block_m)}"),
            (tile_heights == of_target, f"blocks for tiles of {of_target} rows, compared {tile_heights}"),
            (len(self.hidden) >= 2, f"several model widths, compared {sorted(self.hidden)}"),
            (tokens <= self.tokens, f"tokens {sorted(tokens)}, compared {sorted(self.tokens)}"),
        ]
        if stage >= Stage.L1_GEMM:
            wanted.append((len(self.l1_tiles) >= 2, f"several L1 tiles of a block, compared {sorted(self.l1_tiles)}"))
        if stage is Stage.L1_GEMM:
            wanted += [
                (max(self.window_rows, default=0) >= 1, f"windows of later pool rows: {sorted(self.window_rows)}"),
                (max(self.window_columns, default=0) >= 1, f"windows of later columns: {sorted(self.window_columns)}"),
            ]
        if stage >= Stage.L1_EPILOGUE:
            wanted.append(
                (self.l2_sf_granularity == {64, 128}, f"both granularities, compared {sorted(self.l2_sf_granularity)}")
            )
        if stage >= Stage.L2_GEMM:
            wanted.append((len(self.l2_tiles) >= 2, f"several L2 tiles of a block, compared {sorted(self.l2_tiles)}"))
        return [message for holds, message in wanted if not holds]

    def figures(self) -> dict[str, int]:
        return {f"compared_{member.name}": len(getattr(self, member.name)) for member in fields(self)}
