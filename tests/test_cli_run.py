"""``megamoe run``: MoE blocks against transformers and the oracle, over virtual ranks and torchrun, and its errors."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner, Result

import megamoe
import megamoe.cli.layer_run as layer_run
from megamoe.checkpoint import describe_layer
from megamoe.cli import app
from megamoe.cli.hidden import generate_hidden, open_hidden
from megamoe.cli.ranks import resolve_target, split_tokens
from megamoe.config import MegaMoEConfig
from megamoe.faults import MegaMoEFault
from megamoe.quant import quantize_activations, quantize_weights
from megamoe.reference import RankInputs, compare, moe_layer, norm_error
from megamoe.routing import Routing
from megamoe.weights import transform_weights_for_mega_moe
from tests.checkpoint_files import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYER,
    TOPK,
    SmallLayer,
    as_the_layer_has_it,
    random_hidden,
    random_layer,
    save_checkpoint,
    transformers_block,
    transformers_routed,
)
from tests.fake_cuda import FakeGpus, replacements
from tests.test_checkpoint import REAL_EXPERT_BYTES, write_real_size_layer
from tests.test_routing import NEAR, decision_margin, exact_scores

ROOT = Path(__file__).parents[1]
MODELS = ("deepseek_v3", "qwen3_moe")


def invoke(folder: Path, *arguments: object, layer: int = LAYER) -> Result:
    command = ["run", "--checkpoint", str(folder), "--layer", str(layer), "--target", "host", "--timeout-s", "30"]
    return CliRunner().invoke(app, [*command, *map(str, arguments)])


def run_and_load(folder: Path, output: Path, *arguments: object) -> tuple[dict[str, Tensor], str]:
    result = invoke(folder, "--output", output, *arguments)
    assert result.exit_code == 0, result.output
    return load_file(output), result.stdout


def torchrun(num_ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "megamoe.cli"]
    return subprocess.run(
        [*launcher, "run", *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )


def oracle_block(
    layer: SmallLayer, hidden: Tensor, topk_idx: Tensor, topk_weights: Tensor, scale: torch.dtype
) -> Tensor:
    """Our oracle of the same block, from the layer's tensors and not from its files: float64 [tokens, HIDDEN]."""
    config = MegaMoEConfig(1, EXPERTS, TOPK, HIDDEN, INTERMEDIATE, hidden.shape[0])
    stacked = {name: torch.stack([e[name] for e in layer.experts]) for name in ("gate_proj", "up_proj", "down_proj")}
    l1, l1_sf = quantize_weights(torch.cat((stacked["gate_proj"], stacked["up_proj"]), dim=1))
    l2, l2_sf = quantize_weights(stacked["down_proj"])
    weights = transform_weights_for_mega_moe((l1, l1_sf.to(scale).float()), (l2, l2_sf.to(scale).float()))
    x, x_sf = quantize_activations(hidden)
    return moe_layer(config, [RankInputs(x, x_sf, topk_idx, topk_weights)], [weights])[0]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(
    ("fp8", "scale_dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_the_whole_block(tmp_path: Path, model_type: str, fp8: bool, scale_dtype: torch.dtype) -> None:
    layer = random_layer(model_type, seed=5)
    folder = save_checkpoint(tmp_path / "model", layer, fp8=fp8, num_shards=3, scale_dtype=scale_dtype)
    hidden = random_hidden(97, seed=6)
    save_file({"hidden_states": hidden}, tmp_path / "hidden.safetensors")
    result, text = run_and_load(
        folder, tmp_path / "y.safetensors", "--ranks", 2, "--hidden", tmp_path / "hidden.safetensors"
    )
    y, topk_idx, topk_weights = result["y"], result["topk_idx"], result["topk_weights"]
    assert (y.dtype, topk_idx.dtype, topk_weights.dtype) == (torch.bfloat16, torch.int64, torch.float32)

    scale_dtype = scale_dtype if fp8 else torch.float32
    oracle = oracle_block(layer, hidden, topk_idx, topk_weights, scale_dtype)
    assert compare("y", y, oracle).ok
    assert norm_error(y, oracle) < 8e-3

    same_weights = transformers_block(as_the_layer_has_it(layer, scale_dtype))
    their_y, their_idx, _ = transformers_routed(same_weights, hidden)
    router = describe_layer(layer.config, LAYER).router
    selection = exact_scores(router, hidden, layer.gate)
    clear = decision_margin(router, selection if layer.bias is None else selection + layer.bias.double()) > NEAR
    assert clear.sum() >= 90
    assert torch.equal(topk_idx[clear].sort(-1).values, their_idx[clear].sort(-1).values)
    assert 2e-2 < norm_error(y[clear], their_y[clear]) < 6e-2  # below that it would not be FP8
    their_y, _, _ = transformers_routed(transformers_block(layer), hidden)
    # One rounding to e4m3 costs 2.5e-2; x, h and the weights of both products, in gate and up: sqrt(6) times that is
    # 6.1e-2 already. Measured: 6.3e-2 to 6.5e-2.
    assert norm_error(y[clear], their_y[clear]) < 7e-2

    printed = re.search(r"norm-wise (\S+) \(bound 8e-03\).*: ok", text)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(norm_error(y, oracle), rel=0.02)
    counts = [int((topk_idx == expert).sum()) for expert in range(EXPERTS)]
    for rank, experts in enumerate((range(8), range(8, 16))):
        total = sum(counts[e] for e in experts)
        assert f"rank {rank} owns experts {experts[0]} to {experts[-1]}: {total} routes" in text
        assert all(re.search(rf"\b{e}: {counts[e]}\b", text) for e in experts if counts[e])
    for stage in ("load", "route", "quantise", "run", "oracle"):
        assert re.search(rf"\b{stage} \d+\.\d+ s", text), stage
    assert "3 of 3 opened" in text


def test_fp32_hidden_states_route_in_fp32(tmp_path: Path) -> None:
    layer = random_layer("qwen3_moe", seed=5)
    folder = save_checkpoint(tmp_path / "model", layer)
    hidden = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(9))
    save_file({"hidden_states": hidden}, tmp_path / "hidden.safetensors")
    result, _ = run_and_load(folder, tmp_path / "y", "--hidden", tmp_path / "hidden.safetensors")
    block = transformers_block(as_the_layer_has_it(layer, torch.float32))
    their_y, their_idx, their_weights = transformers_routed(block, hidden)
    assert torch.equal(result["topk_idx"].sort(-1).values, their_idx.sort(-1).values)
    torch.testing.assert_close(result["topk_weights"], their_weights, rtol=2e-5, atol=1e-7)
    assert norm_error(result["y"], their_y) < 6e-2


def test_any_number_of_ranks_and_torchrun_give_the_same_bits(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("deepseek_v3"), fp8=True, num_shards=8)
    arguments = ("--tokens", 33, "--seed", 7, "--distribution", "heavy-tailed")
    first, text = run_and_load(folder, tmp_path / "y1", *arguments)
    assert "1 virtual ranks" in text
    for num_ranks, shares in ((2, "17 + 16"), (4, "9 + 8 + 8 + 8"), (8, "5 + 4 + 4 + 4 + 4 + 4 + 4 + 4")):
        result, text = run_and_load(folder, tmp_path / f"y{num_ranks}", *arguments, "--ranks", num_ranks)
        assert shares in text
        assert all(torch.equal(result[name], first[name]) for name in first)

    command = ("--checkpoint", folder, "--layer", LAYER, "--target", "host", "--output", tmp_path / "y", *arguments)
    processes = torchrun(2, *command)
    assert processes.returncode == 0, processes.stderr
    result = load_file(tmp_path / "y")
    assert all(torch.equal(result[name], first[name]) for name in first)
    assert "2 processes" in processes.stdout
    assert processes.stdout.count("y against the oracle") == 1
    # experts 0 to 7 lie in shards 1 to 5 and the gate in shard 1, experts 8 to 15 in shards 5 to 8
    opened = re.search(r"rank 0: (\d), rank 1: (\d) of 8 opened", processes.stdout)
    assert opened is not None
    assert max(int(opened[1]), int(opened[2])) <= 5


@pytest.mark.parametrize("tokens", [0, 1])
def test_ranks_without_tokens(tmp_path: Path, tokens: int) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("qwen3_moe"))
    result, text = run_and_load(folder, tmp_path / "y", "--ranks", 4, "--tokens", tokens)
    assert result["y"].shape == (tokens, HIDDEN)
    assert result["topk_idx"].shape == (tokens, TOPK)
    assert " + ".join(["1" if tokens else "0", "0", "0", "0"]) in text


def test_only_the_first_tokens_of_a_file(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("qwen3_moe"))
    save_file({"hidden_states": random_hidden(20)}, tmp_path / "hidden")
    whole, _ = run_and_load(folder, tmp_path / "y", "--hidden", tmp_path / "hidden")
    part, _ = run_and_load(folder, tmp_path / "y", "--hidden", tmp_path / "hidden", "--tokens", 6)
    assert torch.equal(part["y"], whole["y"][:6])


def test_a_nan_token_is_nan_and_alone(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("deepseek_v3"))
    hidden = random_hidden(12)
    save_file({"hidden_states": hidden}, tmp_path / "hidden")
    clean, _ = run_and_load(folder, tmp_path / "y", "--ranks", 2, "--hidden", tmp_path / "hidden")
    hidden[3, 100] = torch.nan
    save_file({"hidden_states": hidden}, tmp_path / "hidden")
    result, _ = run_and_load(folder, tmp_path / "y", "--ranks", 2, "--hidden", tmp_path / "hidden")
    others = torch.arange(12) != 3
    assert result["y"][3].isnan().all()
    assert torch.equal(result["y"][others], clean["y"][others])


def test_an_answer_beyond_the_bound_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("qwen3_moe"))

    def off_by_two_percent(*arguments: Any, **options: Any) -> list[Tensor]:
        return [1.02 * y for y in moe_layer(*arguments, **options)]

    monkeypatch.setattr(layer_run, "moe_layer", off_by_two_percent)
    result = invoke(folder)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


def test_a_fault_is_exit_code_1_and_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("qwen3_moe"))

    def fault(*arguments: Any, **options: Any) -> None:
        raise MegaMoEFault("rank 2 waited 5.0 s for rank 5")

    monkeypatch.setattr(megamoe, "launch_mega_moe", fault)
    result = invoke(folder)
    assert (result.exit_code, result.stderr) == (1, "megamoe run: error: rank 2 waited 5.0 s for rank 5\n")


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= changes.pop("quantization_config", {})
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def no_change(folder: Path) -> None:
    del folder


def test_a_full_disk_is_told_and_leaves_the_old_file(tmp_path: Path) -> None:
    output = tmp_path / "y"
    output.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ValueError, match=f"--output {output}: .*File too large"):
            layer_run.save_output(output, torch.zeros(64, 64), Routing(torch.zeros(64, 2), torch.zeros(64, 2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_the_limit_of_waits_is_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(tmp_path, random_layer("deepseek_v3"), fp8=True)
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "soon")
    result = CliRunner().invoke(app, ["run", "--checkpoint", str(folder), "--layer", str(LAYER), "--target", "host"])
    assert result.exit_code == 2, result.output
    assert "MEGAMOE_TIMEOUT_S: got 'soon', expected seconds" in result.stderr
    assert invoke(folder).exit_code == 0  # --timeout-s 30


def test_output_goes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    layer_run.save_output(tmp_path / "link", torch.ones(2, 4), Routing(torch.zeros(2, 2), torch.zeros(2, 2)))
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(load_file(tmp_path / "there")["y"], torch.ones(2, 4))


@pytest.mark.parametrize(
    ("edit", "arguments", "layer", "words"),
    [
        (
            edit_config(quantization_config={"weight_block_size": [128, 64]}),
            (),
            LAYER,
            "weight_block_size is [128, 64]",
        ),
        (edit_config(model_type="mixtral"), (), LAYER, "model_type is 'mixtral'"),
        (no_change, (), 0, "layer 0 is dense: first_k_dense_replace is 1"),
        (no_change, (), 9, "layer 9 is out of range: the model has layers 0 to 3"),
        (no_change, (), 3, "tensor model.layers.3.mlp.gate.weight is missing"),
        (no_change, ("--ranks", 3), LAYER, "got 16 experts over 3 ranks"),
        (no_change, ("--ranks", 0), LAYER, "--ranks is 0, expected at least 1"),
        (no_change, ("--tokens", -1), LAYER, "--tokens is -1"),
        (no_change, ("--seed", -1), LAYER, "--seed is -1"),
        (no_change, ("--hidden", "nowhere"), LAYER, "--hidden nowhere: no such file"),
        (no_change, ("--output", "/"), LAYER, "--output /: is a folder or a device"),
        (no_change, ("--output", "/dev/full"), LAYER, "--output /dev/full: is a folder or a device"),
        (no_change, ("--output", "nowhere/y"), LAYER, "--output nowhere/y: no folder nowhere"),
        (lambda folder: (folder / "config.json").unlink(), (), LAYER, "config.json is missing"),
    ],
)
def test_a_wrong_call_is_exit_code_2_and_one_line(
    tmp_path: Path, edit: Callable[[Path], None], arguments: tuple[object, ...], layer: int, words: str
) -> None:
    folder = save_checkpoint(tmp_path, random_layer("deepseek_v3"), fp8=True)
    edit(folder)
    result = invoke(folder, *arguments, layer=layer)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.startswith("megamoe run: error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("tensors", "tokens", "words"),
    [
        ({"x": torch.zeros(1)}, None, "hidden_states"),
        ({"hidden_states": torch.zeros(4, HIDDEN).half()}, None, "has dtype F16, expected BF16 or F32"),
        (
            {"hidden_states": torch.zeros(4, HIDDEN + 1)},
            None,
            f"has shape [4, {HIDDEN + 1}], expected [tokens, {HIDDEN}]",
        ),
        ({"hidden_states": torch.zeros(HIDDEN)}, None, f"has shape [{HIDDEN}], expected [tokens, {HIDDEN}]"),
        ({"hidden_states": torch.zeros(4, HIDDEN)}, 5, "--tokens is 5, but"),
    ],
)
def test_hidden_states_of_another_kind(
    tmp_path: Path, tensors: dict[str, Tensor], tokens: int | None, words: str
) -> None:
    save_file(tensors, tmp_path / "hidden")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        open_hidden(tmp_path / "hidden", HIDDEN, tokens)
    assert str(tmp_path / "hidden") in str(caught.value)


def test_torchrun_names_the_rank_that_misses_a_tensor_and_ends_all(tmp_path: Path) -> None:
    missing = f"model.layers.{LAYER}.mlp.experts.12.up_proj.weight"
    folder = save_checkpoint(tmp_path, random_layer("deepseek_v3"), num_shards=2, without=missing)
    processes = torchrun(2, "--checkpoint", folder, "--layer", LAYER, "--target", "host", "--tokens", 64)
    assert processes.returncode != 0
    assert f"megamoe run: error: on rank 1: tensor {missing} is missing" in processes.stderr
    assert processes.stderr.count("megamoe run: error") == 1
    assert processes.stderr.count("exitcode  : 2") >= 1
    assert 'megamoe/cli/run.py", line' not in processes.stderr


def test_ranks_must_be_what_torchrun_started(tmp_path: Path) -> None:
    processes = torchrun(2, "--checkpoint", tmp_path, "--layer", LAYER, "--ranks", 4)
    assert processes.returncode != 0
    assert "megamoe run: error: --ranks is 4, but torchrun started 2 (WORLD_SIZE)\n" in processes.stderr
    assert processes.stderr.count("megamoe run: error") == 1


def test_without_a_compiler_the_run_says_so(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("qwen3_moe"))
    environment = {**os.environ, "CXX": "/nowhere/g++", "MEGAMOE_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "megamoe.cli", "run", "--checkpoint", str(folder), "--layer", str(LAYER)]
    result = subprocess.run(
        [*command, "--target", "host"], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment
    )
    assert result.returncode == 2
    assert result.stderr.startswith("megamoe run: error: ")
    assert "/nowhere/g++" in result.stderr
    assert "Traceback" not in result.stderr


def test_generated_rows_depend_on_their_number_only() -> None:
    whole = generate_hidden("heavy-tailed", 3, 256, 200).read(0, 200)
    assert whole.dtype == torch.bfloat16
    source = generate_hidden("heavy-tailed", 3, 256, 500)
    for start, stop in ((0, 1), (63, 65), (64, 128), (190, 200), (17, 17)):
        assert torch.equal(source.read(start, stop), whole[start:stop])
    assert not torch.equal(generate_hidden("heavy-tailed", 4, 256, 200).read(0, 200), whole)
    by_channel = whole.float().std(0)
    assert (by_channel > 40).sum() == 4
    assert ((by_channel > 0.7) & (by_channel < 1.3)).sum() == 252


def test_the_best_target_is_the_gpu_where_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert [resolve_target(name) for name in ("best", "sm90", "host")] == ["sm90", "sm90", "host"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert resolve_target("best") == "host"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_target("best") == "host"


def test_target_sm90_runs_the_layer_and_says_that_it_keeps_no_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python over CPU memory, with the emulator in place of the kernel (tests/fake_cuda.py)."""
    folder = save_checkpoint(tmp_path / "model", random_layer("qwen3_moe", seed=5), fp8=True)
    on_host, _ = run_and_load(folder, tmp_path / "host.safetensors", "--ranks", 2)
    gpus = FakeGpus()
    for owner, name, stand_in in replacements(gpus):
        monkeypatch.setattr(owner, name, stand_in, raising=False)
    arguments = ("--ranks", 2, "--target", "sm90", "--accumulate", "fast")
    on_gpu, text = run_and_load(folder, tmp_path / "sm90.safetensors", *arguments)
    gpus.synchronize()
    assert torch.equal(on_gpu["y"].view(torch.int16), on_host["y"].view(torch.int16))
    assert "2 virtual ranks, target sm90, accumulate fast" in text
    assert "(bound 2e-02)" in text
    assert "target sm90 keeps no clock" in text


def test_a_process_without_a_gpu_of_its_own_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(tmp_path / "model", random_layer("qwen3_moe", seed=5), fp8=True)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = invoke(folder, "--target", "sm90")
    assert result.exit_code == 2
    assert "process 3 of this machine needs a GPU of its own, and there are 2" in result.output


def test_shares_differ_by_one_at_most() -> None:
    assert split_tokens(7, 4) == [2, 2, 2, 1]
    assert split_tokens(0, 3) == [0, 0, 0]
    assert split_tokens(200_000, 72) == [2778] * 56 + [2777] * 16


_RUN_REAL_SIZE = """
import sys
from pathlib import Path
from megamoe.cli import app
app(sys.argv[1:], standalone_mode=False)
lines = Path("/proc/self/status").read_text().splitlines()
print("peak", next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")))
"""


def test_a_real_size_layer_runs_in_bounded_memory(tmp_path: Path) -> None:
    """256 experts of 7168 x 2048; the gate is zero, so every token goes to experts 0 to 7 of shard 1."""
    write_real_size_layer(tmp_path, routed=range(8))
    arguments = ["run", "--checkpoint", str(tmp_path), "--layer", "3", "--ranks", "2", "--tokens", "2"]
    result = subprocess.run(
        [sys.executable, "-c", _RUN_REAL_SIZE, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"y against the oracle, .*: ok\n", result.stdout)
    assert "1 of 4 opened" in result.stdout
    assert "256, top-8, 8 of them routed" in result.stdout
    peak = int(result.stdout.split("peak ")[1])
    assert peak < 256 * REAL_EXPERT_BYTES / 5, f"{peak / 2**30:.2f} GiB"


def test_layout_command() -> None:
    result = CliRunner().invoke(app, ["layout", "--ranks", "2", "--experts", "16", "--tokens", "8", "--hidden", "256"])
    assert result.exit_code == 0, result.output
    assert "expert_done" in result.stdout
    narrow = CliRunner().invoke(app, ["layout", "--block-m", "32"])
    assert narrow.exit_code == 0, narrow.output
    by_variable = CliRunner().invoke(app, ["layout"], env={"MEGAMOE_CONFIG": "block_m=32"})
    assert by_variable.stdout == narrow.stdout != CliRunner().invoke(app, ["layout"]).stdout
    assert CliRunner().invoke(app, ["layout"], env={"MEGAMOE_CONFIG": "rows=1"}).exit_code == 2
    wrong = CliRunner().invoke(app, ["layout", "--experts", "15"])
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("megamoe layout: error: num_experts")
