"""Several buffers in words: those of dumps, and those of other processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megamoe.config import MegaMoEConfig, Stage
from megamoe.inspect.counters import describe_seen, read_counters
from megamoe.inspect.dump import Dump, LaunchFacts, find_dumps, load_dump
from megamoe.inspect.image import Image
from megamoe.inspect.outside import OutsideBuffers
from megamoe.inspect.verdict import find_culprit


def describe_group(images: Sequence[Image], num_ranks: int) -> list[str]:
    """One line on who holds up whom, then what each rank's counters say."""
    by_rank = {image.rank: image for image in images}
    seen = {rank: read_counters(image) for rank, image in sorted(by_rank.items())}
    lines = [find_culprit(seen, num_ranks)]
    for rank, counters in seen.items():
        lines += ["", f"from {by_rank[rank].origin}", describe_seen(counters, by_rank)]
    return lines


def describe_config(config: MegaMoEConfig) -> str:
    """The layer in one line."""
    return (
        f"{config.num_experts} experts over {config.num_ranks} ranks, top-{config.num_topk}, hidden {config.hidden}, "
        f"intermediate {config.intermediate_hidden}, {config.num_max_tokens_per_rank} tokens a rank, blocks of "
        f"{config.block_m} rows"
    )


def describe_facts(facts: LaunchFacts | None) -> str:
    """What the launch was asked to do."""
    if facts is None:
        return "launch: not known"
    tokens = ", ".join(map(str, facts.num_tokens))
    stage = Stage(facts.stage).name.lower()
    return f"launch: case {facts.case or '(no name)'}, up to stage {stage}, tokens of the ranks {tokens}"


def describe_dumps(places: Sequence[Path]) -> list[str]:
    """Every dump below some paths, those of one launch together.

    Raises:
        ValueError, OSError: a path holds no dump that can be read.
    """
    groups: dict[tuple[Path, str], list[Dump]] = {}
    for path in find_dumps(places):
        groups.setdefault((path.parent, path.name.partition("-")[2]), []).append(load_dump(path))
    lines: list[str] = []
    for members in groups.values():
        config = members[0].image.config
        lines += [describe_config(config), describe_facts(members[0].facts)]
        for dump in members:
            lines += [f"{dump.path.name} does not hold {name}: {why}" for name, why in dump.omitted.items()]
        lines += [*describe_group([dump.image for dump in members], config.num_ranks), ""]
    return lines[:-1]


def describe_outside(buffers: OutsideBuffers) -> list[str]:
    """Every buffer of other processes, those of one config together."""
    lines = list(buffers.problems)
    for config, members in buffers.groups().items():
        lines += [describe_config(config), *describe_group(list(members.values()), config.num_ranks), ""]
    return lines[:-1] if lines and not lines[-1] else lines
