"""A rank's buffer as a file: a zip archive that says what it is in ``dump.json`` and has the bytes of each region.

Counters, tables, routes and metadata are always in it; of the large regions (activations, scales, partial results)
those of at most `MAX_DATA_BYTES`, up to `MAX_TOTAL_BYTES` together. ``dump.json`` says what was left out, and why.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megamoe.config import MegaMoEConfig, Stage
from megamoe.files import written_whole
from megamoe.inspect.image import Image, NotSaved
from megamoe.layout import ITEM_BYTES, Region

FORMAT = 1
SUFFIX = ".dump"
ABOUT = "dump.json"
MAX_DATA_BYTES = 16 << 20
MAX_TOTAL_BYTES = 64 << 20
DATA_REGIONS = ("x", "x_sf", "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf", "combine")
_COMPRESSION_LEVEL = 1  # most of a pool is poison or zero, which any level shrinks


@dataclass(frozen=True)
class LaunchFacts:
    """What a launch was asked to do, as far as the buffer does not say it. All fields but the first may be unknown.

    Attributes:
        num_tokens: of every rank.
        stage: where the launch stops.
        case: name of the phase's case.
        target: host or sm90.
        windows: by rank: (row block, column block) of l1_accum_debug.
        activation_clamp: of SwiGLU, or None.
        weights_kind: of ``phases.support.inputs.make_weights``; empty: made in another way.
        bounds: by view: name of the bound that it is compared with the oracle by, in the order of the comparisons.
    """

    num_tokens: tuple[int, ...]
    stage: int
    case: str = ""
    target: str = ""
    windows: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    activation_clamp: float | None = None
    weights_kind: str = ""
    bounds: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> LaunchFacts:
        """From JSON, which has texts for keys and lists for tuples."""
        windows = {int(rank): (int(row), int(column)) for rank, (row, column) in values["windows"].items()}
        num_tokens = tuple(int(number) for number in values["num_tokens"])
        return cls(**{**values, "num_tokens": num_tokens, "windows": windows, "stage": Stage(values["stage"])})


@dataclass(frozen=True)
class Extra:
    """A tensor that is not in the buffer: y, or a weight. ``dtype`` as layout names them."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


@dataclass(frozen=True)
class Dump:
    """A dump that was opened. ``image`` raises `NotSaved` for what was left out."""

    path: Path
    image: Image
    facts: LaunchFacts | None
    omitted: Mapping[str, str]
    checksums: Mapping[str, int]
    _extras: Mapping[str, tuple[str, tuple[int, ...]]]

    @property
    def rank(self) -> int:
        return self.image.rank

    @cached_property
    def extras(self) -> dict[str, Extra]:
        return {
            name: Extra(dtype, shape, _read_member(self.path, f"extra/{name}", ITEM_BYTES[dtype] * math.prod(shape)))
            for name, (dtype, shape) in self._extras.items()
        }


def _read_member(path: Path, name: str, num_bytes: int) -> bytes:
    """Raises ValueError, naming the file, where it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            content = archive.read(name)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ValueError(f"{path}: damaged: {name} cannot be read: {error}") from error
    if len(content) != num_bytes:
        raise ValueError(f"{path}: damaged: {name} has {len(content)} bytes, expected {num_bytes}")
    return content


def write_dump(
    path: Path,
    image: Image,
    facts: LaunchFacts | None = None,
    extras: Mapping[str, Extra] | None = None,
    checksums: Mapping[str, int] | None = None,
) -> None:
    """Save an image, whole or not at all.

    Args:
        path: of the file; its folder exists.
        image: what to save.
        facts: of the last launch.
        extras: what belongs to the launch and is not in the buffer.
        checksums: crc32 of tensors that are left out and can be made again.

    Raises:
        OSError: the image cannot be read, or the file not be written.
    """
    omitted = {
        name: f"{size} bytes; a dump holds data regions of at most {MAX_DATA_BYTES} bytes, {MAX_TOTAL_BYTES} in all"
        for name, size in _too_large(image).items()
    }
    about = {
        "format": FORMAT,
        "config": asdict(image.config),
        "rank": image.rank,
        "origin": image.origin,
        "facts": asdict(facts) if facts is not None else None,
        "omitted": omitted,
        "extras": {name: [extra.dtype, extra.shape] for name, extra in (extras or {}).items()},
        "checksums": dict(checksums or {}),
    }
    with (
        written_whole(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION_LEVEL) as archive,
    ):
        archive.writestr(ABOUT, json.dumps(about, indent=1))
        for region in image.layout.regions:
            if region.name not in omitted:
                archive.writestr(f"region/{region.name}", image.region_bytes(region.name))
        for name, extra in (extras or {}).items():
            archive.writestr(f"extra/{name}", extra.content)


def _too_large(image: Image) -> dict[str, int]:
    """Data regions that a dump leaves out, with their bytes."""
    left, omitted = MAX_TOTAL_BYTES, {}
    for name in DATA_REGIONS:
        size = image.layout[name].num_bytes
        if size > min(MAX_DATA_BYTES, left):
            omitted[name] = size
        else:
            left -= size
    return omitted


def load_dump(path: Path) -> Dump:
    """Open a dump.

    Raises:
        ValueError: it is no dump, or one of another version; names the file.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(ABOUT))
        if about["format"] != FORMAT:
            raise ValueError(f"a dump of format {about['format']}, expected {FORMAT}")
        config, facts, rank = MegaMoEConfig(**about["config"]), about["facts"], int(about["rank"])
        parsed = LaunchFacts.parse(facts) if facts is not None else None
        omitted, checksums = dict(about["omitted"]), dict(about["checksums"])
        extras = {name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in about["extras"].items()}
        origin = f"{path.name} ({about['origin']})"
        _check_ranks(config, rank, parsed)
        unknown = sorted({dtype for dtype, _ in extras.values()} - set(ITEM_BYTES))
        if unknown:
            raise ValueError(f"unknown dtype {', '.join(unknown)}")
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a dump of this version of megamoe: {error}") from error
    known: dict[str, bytes] = {}

    def read(region: Region, first: int, size: int) -> bytes:
        if region.name in omitted:
            raise NotSaved(f"{path.name} does not hold {region.name}: {omitted[region.name]}")
        if region.name not in known:
            known[region.name] = _read_member(path, f"region/{region.name}", region.num_bytes)
        return known[region.name][first : first + size]

    return Dump(path, Image(config, rank, origin, read), parsed, omitted, checksums, extras)


def _check_ranks(config: MegaMoEConfig, rank: int, facts: LaunchFacts | None) -> None:
    if not 0 <= rank < config.num_ranks:
        raise ValueError(f"rank {rank} of {config.num_ranks}")
    num_tokens = facts.num_tokens if facts is not None else (0,) * config.num_ranks
    if len(num_tokens) != config.num_ranks or not all(0 <= n <= config.num_max_tokens_per_rank for n in num_tokens):
        raise ValueError(f"tokens {num_tokens} of {config.num_ranks} ranks with {config.num_max_tokens_per_rank} each")


def find_dumps(places: Sequence[Path]) -> list[Path]:
    """The dump files that paths name: a file itself, or all below a folder, by name.

    Raises:
        ValueError: a path does not exist, or there is no dump below a folder.
    """
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            below = sorted(place.rglob(f"*{SUFFIX}"))
            if not below:
                raise ValueError(f"{place}: no file *{SUFFIX} below it")
            found += below
        elif place.exists():
            found.append(place)
        else:
            raise ValueError(f"{place}: no such file or folder")
    return found


def load_group(place: Path) -> dict[int, Dump]:
    """The dumps of one launch by rank: those of a folder, or a file and its siblings of other ranks.

    Siblings have the same name but for ``rank<r>``.

    Raises:
        ValueError: there is none, or several of one rank; names them.
    """
    paths = find_dumps([place])
    if place.is_file():
        rank, dash, rest = place.name.partition("-")
        paths = sorted(place.parent.glob(f"rank*-{rest}")) if dash and rank.startswith("rank") else [place]
    groups: dict[str, dict[int, Dump]] = {}
    for path in paths:
        dump = load_dump(path)
        groups.setdefault(f"{path.parent}/*-{path.name.partition('-')[2]}", {})[dump.rank] = dump
    if len(groups) > 1:
        files = ", ".join(str(group[min(group)].path) for group in groups.values())
        raise ValueError(f"{place}: dumps of {len(groups)} launches, name one by a file of it: {files}")
    (group,) = groups.values()
    return group
