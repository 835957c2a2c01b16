"""Saved buffers: what a failing phase leaves, and what `megamoe inspect` and `megamoe diff` make of it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from harness.hang import BUFFER_LINK, HANG_FOLDER, Trouble, answer_file, read_launch_facts, write_bundle
from harness.processes import own_key
from harness.rank import DUMP_SUFFIX, DUMP_VIEWS_VARIABLE, launch_file
from harness.spec import load_specs
from megamoe import DebugWindow, L1Weights, Stage, launch_mega_moe
from megamoe.buffer import DEBUG_VIEWS
from megamoe.cli import app
from megamoe.groups import TARGETS
from megamoe.inspect import describe_counters, image_of
from megamoe.inspect import dump as dump_module
from megamoe.inspect.diff import SOURCES, VIEW_STAGES, diff_dumps, runs_words
from megamoe.inspect.dump import LaunchFacts, load_dump, load_group, write_dump
from megamoe.inspect.image import NotSaved
from megamoe.inspect.names import LINK_PREFIX, memfd_name, parse_memfd_link
from megamoe.inspect.outside import OutsideBuffers
from megamoe.inspect.rows import PULL_WINDOW, rows_per_run, run_of_row
from megamoe.inspect.tensors import region_tensor
from megamoe.layout import buffer_layout
from phases.phase4 import l1_epilogue_correctness as phase4
from phases.phase6 import end_to_end_correctness as phase6
from phases.support import dumps, launches
from phases.support.inputs import Workload, make_tokens
from phases.support.launches import Launcher, Options
from phases.support.ranks import open_ranks
from phases.support.runner import run_phase
from phases.support.workloads import make_config
from tests.harness_project import REPOSITORY

SPECS = load_specs(REPOSITORY / "phases")
MAKERS = {4: phase4.make_cases, 6: phase6.make_cases}


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Phases set the number of torch's threads for a process of their own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def phase_here(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *cases: str) -> int:
    """Run cases of a phase in this process, on two virtual ranks, as a step of the harness whose files go to folder."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("MEGAMOE_RUN_DIR", str(folder))
    arguments = ["--ranks", "2", "--group", "virtual", "--cases", ",".join(cases)]
    return run_phase(SPECS[number].script.parent, MAKERS[number], arguments)


def break_up_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the gate's scales for up: what the oracle knows nothing of."""

    def launch(y: Any, l1: L1Weights, *rest: Any, **options: Any) -> None:
        half = l1.sf.shape[1] // 2
        launch_mega_moe(y, L1Weights(l1.weight, torch.cat([l1.sf[:, :half]] * 2, dim=1)), *rest, **options)

    monkeypatch.setattr(launches, "launch_mega_moe", launch)


def saved_below(folder: Path) -> Path:
    (place,) = {path.parent for path in folder.rglob("*.dump")}
    return place


# --- a phase that fails -----------------------------------------------------------------------------------------------


def test_a_failing_phase_leaves_what_diff_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_up_scales(monkeypatch)
    assert phase_here(4, tmp_path, monkeypatch, "normal", "one_expert") == 1
    place = saved_below(tmp_path)  # of the first failure alone
    assert {path.name for path in place.iterdir()} == {"rank0-views.dump", "rank1-views.dump"}
    code, text = call("diff", str(place), "--oracle")
    assert code == 1, text
    assert re.search(r"l1_acts +equal", text)
    assert re.search(r"l1_accum_debug +DIFFERS FIRST: \d+ of \d+ elements, on ranks 0, 1", text)
    assert re.search(r"l2_acts +differs", text)
    assert "written by: L1 epilogue (csrc/host/roles.hpp)" in text
    assert "every view before it is right" in text
    assert re.search(
        r"worst at rank 0, expert \d, pool block \d row \d+ = rank [01] token \d+ slot \d, column \d+", text
    )
    assert "of these columns 0 are gate's (of 64), 64 are up's (of 64)" in text


def test_a_right_layer_has_no_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, to y; and what is not a failure is saved only where that was asked for."""
    assert phase_here(6, tmp_path / "quiet", monkeypatch, "masked") == 0
    assert list(tmp_path.rglob("*.dump")) == []
    monkeypatch.setenv(DUMP_VIEWS_VARIABLE, "1")
    assert phase_here(6, tmp_path / "loud", monkeypatch, "one_expert") == 0
    place = saved_below(tmp_path)
    code, text = call("diff", str(place), "--oracle")
    assert code == 0, text
    assert re.search(r"y +equal: [1-9]", text)
    assert re.search(r"combine +equal: [1-9]", text) or "its phase does not compare it" in text
    assert "do not differ" in text


def test_two_runs_differ_where_a_weight_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP_VIEWS_VARIABLE, "1")
    for name in ("a", "b"):
        phase_here(4, tmp_path / name, monkeypatch, "one_expert")
    assert call("diff", str(tmp_path / "a"), str(tmp_path / "b"))[0] == 0
    break_up_scales(monkeypatch)
    phase_here(4, tmp_path / "c", monkeypatch, "one_expert")
    code, text = call("diff", str(tmp_path / "a"), str(tmp_path / "c"))
    assert code == 1
    assert re.search(r"l1_acts +equal", text)
    assert re.search(r"l1_accum_debug +DIFFERS FIRST: \d+ of \d+ elements, on ranks 1", text)  # who has the expert
    assert re.search(r"first at rank 1, expert 7, pool block 2 row 0 = rank 0 token 18 slot 2, column \d+: ", text)
    assert "0 are gate's" in text


def test_every_process_of_a_failing_step_saves_its_rank(tmp_path: Path) -> None:
    """Only rank 1 has the expert and fails, by a deliberate fault of the protocol; what rank 0 sent is needed too."""
    step = ["--phases", "4", "--target", "host", "--ranks", "2", "--groups", "process", "--cases", "one_expert"]
    ended = subprocess.run(
        [sys.executable, "-m", "harness", "run", *step, "--no-gates", "--runs-dir", str(tmp_path)],
        env={**os.environ, "MEGAMOE_HOST_OPTIONS": "-DMEGAMOE_MUTATION=mask_bit_missing", "COLUMNS": "200"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    place = saved_below(tmp_path)
    assert f"python -m megamoe.cli diff {place} --oracle" in ended.stdout
    assert len(list(place.iterdir())) == 2
    code, text = call("diff", str(place), "--oracle")
    assert code == 1, text
    assert re.search(r"l2_acts +equal", text)
    assert re.search(r"l2_arrival_mask +DIFFERS FIRST: 3 of \d+ elements, on ranks 1", text)
    assert re.search(r"first at rank 1, expert 7, pool block 0, column 0: got 2, expected 3", text)


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "0.6")
    opened = Launcher(open_ranks("virtual", "host", 2))
    yield opened
    opened.close()


def _launch(launcher: Launcher, options: Options | None = None) -> Any:
    config = make_config(launcher.ranks)
    return launcher.launch(config, make_tokens(Workload("dumps", config, (8, 8))), options or Options())


def test_a_dump_says_what_the_buffer_says(launcher: Launcher, tmp_path: Path) -> None:
    launch = _launch(launcher)
    for rank, buffer in launch.buffers.items():
        write_dump(tmp_path / f"rank{rank}-saved.dump", image_of(buffer), LaunchFacts((8, 8), 6, "dumps"))
    group = load_group(tmp_path / "rank0-saved.dump")
    assert set(group) == {0, 1}
    dump = group[1]
    assert dump.facts == LaunchFacts((8, 8), 6, "dumps")
    for region in launch.buffers[1].layout.regions:
        assert dump.image.region_bytes(region.name) == image_of(launch.buffers[1]).region_bytes(region.name)
    assert torch.equal(
        region_tensor(dump.image, "l2_acts_sf").view(torch.int32), launch.buffers[1].l2_acts_sf.view(torch.int32)
    )
    code, text = call("inspect", str(tmp_path))
    assert code == 0
    assert describe_counters(launch.buffers[1]) in text
    assert "case dumps, up to stage combine, tokens of the ranks 8, 8" in text
    assert [item.wrong for item in diff_dumps(group, group)] == [0] * 2 * 16


def test_the_first_wrong_view_is_not_the_last_one_made(launcher: Launcher, tmp_path: Path) -> None:
    """One weight of a pulled row is wrong, on one rank: dispatch is to blame, and everything after it looks right."""
    launch = _launch(launcher)
    launch.buffers[1].l1_topk_weights[2] *= 1.5
    for rank, buffer in launch.buffers.items():
        write_dump(tmp_path / f"rank{rank}-saved.dump", image_of(buffer), launch.facts("test", "host", (8, 8), {}))
    code, text = call("diff", str(tmp_path), "--oracle")
    assert code == 1, text
    assert "l1_topk_weights        DIFFERS FIRST: 1 of 48 elements, on ranks 1" in text
    source, token, slot = launch.buffers[1].token_src_metadata.view(torch.int32)[2].tolist()
    place = f"rank 1, expert 4, pool block 0 row 2 = rank {source} token {token} slot {slot}"
    assert f"first at {place}: got " in text
    assert "written by: pull (csrc/protocol/pull.hpp)" in text
    assert "got/expected from 1.5 to 1.5" in text


def test_counts_of_routes_are_told_with_their_epoch(launcher: Launcher, tmp_path: Path) -> None:
    launch = _launch(launcher)
    launch.buffers[0].expert_recv_count_sum.view(torch.int64)[1] = 7  # of no epoch
    for rank, buffer in launch.buffers.items():
        write_dump(tmp_path / f"rank{rank}-saved.dump", image_of(buffer), launch.facts("test", "host", (8, 8), {}))
    text = call("diff", str(tmp_path), "--oracle")[1]
    assert re.search(r"first at rank 0, expert 1: got 7 routes of epoch 0, expected \d+ routes of epoch 1", text)


def test_large_regions_are_left_out_and_named(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = _launch(launcher)
    monkeypatch.setattr(dump_module, "MAX_DATA_BYTES", 1 << 14)
    for rank, buffer in launch.buffers.items():
        write_dump(tmp_path / f"rank{rank}-saved.dump", image_of(buffer), LaunchFacts((8, 8), 6))
    dump = load_dump(tmp_path / "rank0-saved.dump")
    assert "l1_acts" in dump.omitted
    with pytest.raises(NotSaved, match=r"does not hold l1_acts: .* 16384 bytes"):
        dump.image.region_bytes("l1_acts")
    code, text = call("inspect", str(tmp_path))
    assert code == 0
    assert "does not hold l1_acts" in text
    assert "4 of 4 have all rows" in text
    code, text = call("diff", str(tmp_path), str(tmp_path))
    assert code == 0
    assert re.search(r"l1_acts +not compared: rank0-saved.dump does not hold l1_acts", text)
    code, text = call("diff", str(tmp_path), "--oracle")
    assert code == 2
    assert "the oracle needs the inputs" in text


def test_bad_calls_say_what_is_wrong(launcher: Launcher, tmp_path: Path) -> None:
    launch = _launch(launcher)
    (tmp_path / "text.dump").write_text("no dump")
    write_dump(tmp_path / "rank0-x.dump", image_of(launch.buffers[0]))
    for arguments, words in {
        ("inspect",): "expected a DUMP or --pid",
        ("inspect", str(tmp_path / "none")): "no such file or folder",
        ("inspect", str(tmp_path / "text.dump")): "not a dump of this version",
        ("inspect", "--pid", "1"): "no buffer of a rank",
        ("diff", str(tmp_path / "rank0-x.dump")): "expected A and B, or A and --oracle",
        ("diff", str(tmp_path / "rank0-x.dump"), "--oracle"): "no dump of rank [1]",
    }.items():
        code, text = call(*arguments)
        assert code == 2, text
        assert words in text


def _rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """A copy of a dump whose members are what ``change`` makes of them; None leaves one out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if (content := change(name, old.read(name))) is not None:
                new.writestr(name, content)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"extras": [1]}, "not a dump of this version"),
        ({"omitted": None}, "not a dump of this version"),
        ({"rank": 99}, "rank 99 of"),
        ({"rank": None}, "not a dump of this version"),
        ({"format": 7}, "a dump of format 7, expected 1"),
        ({"facts": {"num_tokens": [10**9], "stage": 2, "windows": {}}}, "tokens (1000000000,) of"),
        ({"facts": {"num_tokens": [1, 1], "stage": 77, "windows": {}}}, "77 is not a valid Stage"),
        ({"extras": {"y": ["bf17", [1]]}}, "unknown dtype bf17"),
    ],
)
def test_a_dump_that_says_nonsense_is_a_bad_call(
    launcher: Launcher, tmp_path: Path, about: dict[str, Any], words: str
) -> None:
    whole, broken = tmp_path / "rank0-x.dump", tmp_path / "broken.dump"
    write_dump(whole, image_of(_launch(launcher).buffers[0]))
    _rewrite(
        whole, broken, lambda name, old: json.dumps(json.loads(old) | about).encode() if name == "dump.json" else old
    )
    for arguments in (("inspect", str(broken)), ("diff", str(broken), str(whole))):
        code, text = call(*arguments)
        assert (code, str(broken) in text, words in text) == (2, True, True), text


def test_a_damaged_dump_is_a_bad_call(launcher: Launcher, tmp_path: Path) -> None:
    whole, broken = tmp_path / "rank0-x.dump", tmp_path / "broken.dump"
    write_dump(whole, image_of(_launch(launcher).buffers[0]))
    _rewrite(whole, broken, lambda name, old: old[: len(old) // 2] if name == "region/pool_blocks" else old)
    for arguments in (("inspect", str(broken)), ("diff", str(broken), str(whole))):
        code, text = call(*arguments)
        assert code == 2
        assert f"{broken}: damaged: region/pool_blocks has" in text
    _rewrite(whole, broken, lambda name, old: None if name == "region/pool_blocks" else old)
    assert "region/pool_blocks cannot be read" in call("diff", str(whole), str(broken))[1]
    _rewrite(whole, broken, lambda name, old: b"\x7f" * len(old) if name == "region/pool_blocks" else old)
    code, text = call("diff", str(whole), str(broken))
    assert code == 2
    assert "the block table does not make sense: block 0 has 2139062143 rows" in text
    _rewrite(whole, broken, lambda name, old: b"\x7f" * len(old) if name.startswith("region/fault_") else old)
    code, text = call("inspect", str(broken))
    assert code == 0
    assert "faults: their records were overwritten: 2139062143 is not a valid FaultKind" in text


def test_a_name_tells_the_config(launcher: Launcher) -> None:
    config = make_config(launcher.ranks)
    assert len(memfd_name(config, 71)) < 249
    assert parse_memfd_link(f"/memfd:{memfd_name(config, 71)} (deleted)") == (71, config)
    assert parse_memfd_link("/memfd:something") is None
    with pytest.raises(ValueError, match="another version"):
        parse_memfd_link("/memfd:megamoe-rank1:[1,2] (deleted)")
    digest = buffer_layout(config).digest
    with pytest.raises(ValueError, match="another version of megamoe, which lays buffers out differently"):
        parse_memfd_link(f"/memfd:{memfd_name(config, 1).replace(digest, digest[::-1])} (deleted)")


# --- what a hang looks like -------------------------------------------------------------------------------------------


def test_missing_rows_have_names(launcher: Launcher, tmp_path: Path) -> None:
    """A row whose run nobody claimed, one that was claimed and never stored, one that was stored and not counted."""
    launch = _launch(launcher, Options(stage=Stage.DISPATCH))
    buffer = launch.buffers[1]
    expert, rows = buffer.view("pool_blocks").view(torch.int32)[0].tolist()
    assert rows > 4
    source, token, slot = buffer.token_src_metadata.view(torch.int32)[rows - 1].tolist()
    origin = f"row {rows - 1} = rank {source} token {token} slot {slot}"
    buffer.l1_arrival_count.view(torch.int32)[0] -= 1
    assert "missing 1 claimed and with metadata in place, not counted" in describe_counters(buffer)
    buffer.token_src_metadata.view(torch.int32)[rows - 1, 2] += 1
    text = describe_counters(buffer)
    assert f"block 0 (expert {4 + expert}): {rows - 1} of {rows} rows arrived" in text
    assert f"missing {origin}: claimed by a worker, not stored" in text
    block_m = buffer.config.block_m
    last_run = run_of_row(0, rows - 1, 4, block_m, rows_per_run(rows, block_m))
    buffer.view("claims").view(torch.int32)[5, 0] = last_run
    assert re.search(rf"missing (row \d+ = .*)?{origin}.*: pulled by nobody yet", describe_counters(buffer))
    write_dump(tmp_path / "rank1-alone.dump", image_of(buffer))
    assert "a row of rank" in call("inspect", str(tmp_path))[1]  # of a rank whose list is not there


def test_runs_of_rows_are_numbered_as_the_kernel_claims_them() -> None:
    """Blocks of 8 rows in windows of 4 blocks; in a window the first runs of all its blocks come first."""
    order = sorted((run_of_row(block, row, 6, 8, 4), block, row) for block in range(6) for row in (0, 4))
    assert [run for run, _, _ in order] == list(range(12))
    assert [(block, row) for _, block, row in order[2:6]] == [(2, 0), (3, 0), (0, 4), (1, 4)]
    assert [(block, row) for _, block, row in order[6:]] == [(2, 4), (3, 4), (4, 0), (5, 0), (4, 4), (5, 4)]
    assert {run_of_row(block, row, 6, 8, 2) for block in range(6) for row in range(0, 8, 2)} == set(range(24))
    assert [rows_per_run(rows, 128) for rows in (0, 1, 4, 5, 64, 65, 128)] == [4, 4, 4, 2, 2, 4, 4]


def test_what_is_written_down_twice_is_the_same() -> None:
    """The harness imports megamoe only where there is a buffer, and neither reads C++."""
    assert (BUFFER_LINK, DUMP_SUFFIX) == (LINK_PREFIX, dump_module.SUFFIX)
    pull = (REPOSITORY / "csrc/protocol/pull.hpp").read_text()
    assert re.findall(r"constexpr uint32_t kPullWindow = (\d+);", pull) == [str(PULL_WINDOW)]
    rule = "return rows > kRowsPerPull && rows <= context.problem->block_m / 2 ? kRowsPerPull / 2 : kRowsPerPull;"
    assert rule in pull, "rows_per_run() of megamoe/inspect/rows.py says the same"


def test_every_view_has_a_source_that_exists() -> None:
    assert set(SOURCES) == set(VIEW_STAGES) == {*DEBUG_VIEWS, "y"}
    for files in SOURCES.values():
        assert len(files) == len(TARGETS)
        assert all((REPOSITORY / file).is_file() for file in files)


def test_runs_of_columns() -> None:
    assert runs_words([3]) == "3"
    assert runs_words([8, 9, 10, 24, 25]) == "8-10, 24-25"
    assert runs_words(list(range(0, 12, 2))) == "0, 2, 4, 6 and 2 more runs, up to 10"


def test_the_memory_of_a_process_is_found(launcher: Launcher) -> None:
    launch = _launch(launcher)
    buffers = OutsideBuffers([own_key().pid])
    try:
        group = buffers.groups()[launch.config]
        assert set(group) == {0, 1}
        for rank, image in group.items():
            assert image.region_bytes("l1_acts") == image_of(launch.buffers[rank]).region_bytes("l1_acts")
    finally:
        buffers.close()
    code, text = call("inspect", "--pid", str(own_key().pid))
    assert code == 0
    assert "rank 1 of 2: epoch 1 ended" in text


# --- buffers that only the rank can read ------------------------------------------------------------------------------


class _Stuck:
    """A CUDA event that is never reached, or at once."""

    reached = True

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.reached


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "stuck"])
def test_a_rank_is_asked_for_what_only_it_can_read(
    answers: bool, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA's streams and events replaced: the request, the answer, and what the bundle says of a stuck context."""
    launch = _launch(launcher)
    monkeypatch.setenv("MEGAMOE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(dumps, "_pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (_Stuck,), {"reached": answers}))
    monkeypatch.setattr(dumps, "POLL_S", 0.01)
    monkeypatch.setattr("harness.hang._holds_buffers", lambda pid: False)  # on a GPU nobody sees it from outside
    dumps.Responder(tmp_path).add([launch.buffers[0]])
    write_bundle(tmp_path, Trouble("a test", {0: own_key()}, {}), 2.0)
    until = time.monotonic() + 5
    while not answer_file(tmp_path, 0).exists() and time.monotonic() < until:
        time.sleep(0.01)
    summary = (tmp_path / HANG_FOLDER / "summary.txt").read_text()
    if answers:
        assert "rank 0, from inside: saved 1 buffers" in summary
        assert "rank 0 of 2: epoch 1 ended" in (tmp_path / HANG_FOLDER / "rank0.txt").read_text()
    else:
        assert "a copy on a stream of its own did not end in time" in answer_file(tmp_path, 0).read_text()
        assert "rank 0, from inside: " in summary


def test_a_launch_is_noted_for_who_explains_it(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMOE_RUN_DIR", str(tmp_path))
    launcher.case = "a case"
    _launch(launcher)
    assert '"case": "a case"' in launch_file(tmp_path, 0).read_text()
    own = own_key()
    monkeypatch.setattr("harness.processes.send_signal", lambda key, number: True)  # not this process
    write_bundle(tmp_path, Trouble("a test", {0: own}, {}), 5.0)
    dump = load_group(tmp_path / HANG_FOLDER)[1]
    assert dump.facts is not None
    assert (dump.facts.case, dump.facts.num_tokens) == ("a case", (8, 8))
    code, text = call("diff", str(tmp_path / HANG_FOLDER), "--oracle")
    assert code == 0, text
    assert re.search(r"l2_acts +equal: [1-9]", text)
    assert re.search(r"combine +equal: [1-9]", text)
    assert re.search(r"y +not compared: the dumps do not hold it", text)


def test_each_process_tells_the_windows_of_its_own_ranks(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in two processes: a bundle has both windows. Where one is missing, that view alone is not compared."""
    monkeypatch.setenv("MEGAMOE_RUN_DIR", str(tmp_path))
    windows = {0: DebugWindow(0, 1), 1: DebugWindow(0, 2)}
    launch = _launch(launcher, Options(stage=Stage.L1_EPILOGUE, windows=windows))
    said = json.loads(launch_file(tmp_path, 0).read_text())
    for rank in windows:
        own = {**said["facts"], "windows": {rank: said["facts"]["windows"][str(rank)]}}
        launch_file(tmp_path, rank).write_text(json.dumps({**said, "facts": own}))
    facts = read_launch_facts(tmp_path, launch.config)
    assert facts is not None
    assert facts.windows == {0: (0, 1), 1: (0, 2)}
    for known in (facts, dataclasses.replace(facts, windows={1: (0, 2)})):
        for rank, buffer in launch.buffers.items():
            write_dump(tmp_path / f"rank{rank}-a.dump", image_of(buffer), known)
        code, text = call("diff", str(tmp_path), "--oracle")
        assert code == 0, text
        assert re.search(r"l2_acts +equal: [1-9]", text)
        assert ("rank 0 did not say where its window is" in text) == (0 not in known.windows)
