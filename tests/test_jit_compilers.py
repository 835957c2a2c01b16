"""g++, NVRTC and nvcc for real: libcu++ in all three, and what ptxas says about registers and spills read back."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from megamoe.jit import (
    CompileError,
    CubinArtifact,
    build_shared_library,
    cccl_include_dir,
    compile_cubin,
    find_nvcc,
    sources,
)
from megamoe.jit.resources import cubin_entry_names, parse_ptxas_report

pytestmark = pytest.mark.usefixtures("private_cache")

ATOMIC = """
#include <cuda/atomic>

using Flag = cuda::atomic_ref<unsigned long long, cuda::thread_scope_system>;
"""

KERNELS = (
    ATOMIC
    + r"""
extern "C" __global__ void publish(unsigned long long* flag, unsigned long long epoch) {
    Flag(*flag).store(epoch, cuda::memory_order_release);
}

// 96 values live at once in a block of 1024 threads, two blocks an SM: 32 registers are allowed.
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(const float* in, float* out) {
    float value[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) value[i] = in[i * 1024 + threadIdx.x];
    for (int round = 0; round < 100; ++round) {
#pragma unroll
        for (int i = 0; i < 96; ++i) value[i] = value[i] * value[(i + 17) % 96] + value[(i + 5) % 96];
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 96; ++i) sum += value[i] * in[i];
    out[threadIdx.x] = sum;
}

template <int num_floats>
__global__ void rotate(float* data) {
    __shared__ float staged[num_floats];
    staged[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = staged[(threadIdx.x + 1) % num_floats];
}
template __global__ void rotate<64>(float*);
"""
)

# An accumulator is changed between two products of one group, so ptxas must serialise them; and setmaxnreg in a
# kernel that does not state its thread count is ignored.
REMARKED = r"""
extern "C" __global__ void __launch_bounds__(128) serialised(float* data, unsigned long long a, unsigned long long b) {
    float d[4] = {0, 0, 0, 0};
    asm volatile("wgmma.fence.sync.aligned;");
    for (int i = 0; i < 3; ++i) {
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %6, 0;"
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(1));
        d[0] += data[i];
    }
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    data[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

extern "C" __global__ void ignored_setmaxnreg(float* data) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    data[0] = 1;
}
"""

NOT_INLINED = r"""
__device__ __noinline__ float recurse(float* data, int n) {
    return n <= 0 ? data[0] : recurse(data + 1, n - 1) * data[n] + recurse(data, n - 2);
}
extern "C" __global__ void caller(float* data, int n) { data[0] = recurse(data, n); }
"""


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "nvcc" and find_nvcc() is None:
        pytest.skip("no nvcc on this machine")
    return name


def compile_text(folder: Path, text: str, compiler: str | None = None, options: tuple[str, ...] = ()) -> CubinArtifact:
    source = folder / "kernels.cu"
    source.write_text(text)
    return compile_cubin("kernels", source, compiler=compiler, options=options)


def test_resources_of_each_kernel(tmp_path: Path, compiler: str) -> None:
    built = compile_text(tmp_path, KERNELS, compiler)
    assert built.path.read_bytes()[:4] == b"\x7fELF"
    (template,) = (name for name in built.kernels if "rotate" in name)
    assert set(built.kernels) == {"publish", "spilling", template}

    spilling = built.kernels["spilling"]
    assert spilling.spills
    assert spilling.registers == 32
    assert spilling.spill_stores_bytes > 0
    assert spilling.spill_loads_bytes > 0
    assert spilling.stack_bytes > 0
    for name in ("publish", template):
        kernel = built.kernels[name]
        assert not kernel.spills
        assert 0 < kernel.registers < 32
        assert (kernel.stack_bytes, kernel.remarks) == (0, ())
    assert built.kernels[template].shared_bytes == 256
    assert built.kernels["publish"].shared_bytes == 0

    again = compile_text(tmp_path, KERNELS, compiler)
    assert again.cached
    assert again.kernels == built.kernels


def test_remarks_reach_their_kernel(tmp_path: Path, compiler: str) -> None:
    kernels = compile_text(tmp_path, REMARKED, compiler).kernels
    assert any("are serialized" in remark for remark in kernels["serialised"].remarks)
    assert not any("are serialized" in remark for remark in kernels["ignored_setmaxnreg"].remarks)
    # ptxas does not say which kernel it means, so it is every kernel's.
    for kernel in kernels.values():
        assert any("'setmaxnreg' ignored" in remark for remark in kernel.remarks)


def test_function_that_is_not_inlined_counts(tmp_path: Path, compiler: str) -> None:
    caller = compile_text(tmp_path, NOT_INLINED, compiler).kernels["caller"]
    assert caller.spills
    assert caller.stack_bytes > 0


def test_options_and_generated_headers_reach_the_compiler(tmp_path: Path, compiler: str) -> None:
    source = tmp_path / "generated.cu"
    source.write_text(
        '#include "layout.hpp"\n#include "beside.hpp"\n'
        'static_assert(LAYOUT + BESIDE + OPTION == 6);\nextern "C" __global__ void nothing() {}\n'
    )
    (tmp_path / "beside.hpp").write_text("#define BESIDE 2\n")
    generated = {"layout.hpp": "#define LAYOUT 1\n"}
    built = compile_cubin("generated", source, generated=generated, options=["-DOPTION=3"], compiler=compiler)
    assert set(built.kernels) == {"nothing"}
    with pytest.raises(CompileError, match=r"static assertion failed|static_assert") as caught:
        compile_cubin("generated", source, generated=generated, options=["-DOPTION=4"], compiler=compiler)
    assert "-DOPTION=4" in caught.value.command
    assert caught.value.command.split()[0].endswith(compiler)
    assert "generated.cu(3)" in caught.value.log


def test_compiler_is_chosen_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extern "C" __global__ void nothing() {}\n'
    monkeypatch.delenv("MEGAMOE_COMPILER", raising=False)
    by_default = compile_text(tmp_path, text)
    assert by_default.compiler == "nvrtc"
    monkeypatch.setenv("MEGAMOE_COMPILER", "clang")
    with pytest.raises(ValueError, match="MEGAMOE_COMPILER is 'clang'; expected one of nvrtc, nvcc"):
        compile_text(tmp_path, text)
    if find_nvcc() is not None:
        monkeypatch.setenv("MEGAMOE_COMPILER", "nvcc")
        by_nvcc = compile_text(tmp_path, text)
        assert by_nvcc.compiler == "nvcc"
        assert by_nvcc.path != by_default.path


def test_report_that_does_not_cover_the_cubin_is_an_error(tmp_path: Path) -> None:
    built = compile_text(tmp_path, KERNELS, "nvrtc")
    names = cubin_entry_names(built.path.read_bytes())
    assert names == set(built.kernels)
    without_spilling = "\n".join(line for line in built.log.splitlines() if "spilling" not in line)
    with pytest.raises(ValueError, match="spilling"):
        parse_ptxas_report(without_spilling, names)
    with pytest.raises(ValueError, match="ptxas reported \\[\\]"):
        parse_ptxas_report("", names)
    with pytest.raises(ValueError, match="not a cubin"):
        cubin_entry_names(b"PTX text")


def test_gxx_library_and_program(tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text('int two();\nextern "C" int answer() { return 40 + two(); }\n')
    (tmp_path / "two.cpp").write_text("int two() { return 2; }\n")
    (tmp_path / "main.cpp").write_text('extern "C" int answer();\nint main() { return answer(); }\n')
    library = build_shared_library("answer", [tmp_path / "one.cpp", tmp_path / "two.cpp"])
    assert library.path.name == "answer.so"
    assert ctypes.CDLL(str(library.path)).answer() == 42
    program = build_shared_library(
        "answer", [tmp_path / f"{name}.cpp" for name in ("main", "one", "two")], executable=True
    )
    assert program.path.name == "answer"
    assert subprocess.run([program.path]).returncode == 42


def test_gxx_warnings_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("int f() { int unused; return 0; }\n")
    built = build_shared_library("a", [tmp_path / "a.cpp"], options=["-Wall"])
    assert "unused variable" in built.log
    assert build_shared_library("a", [tmp_path / "a.cpp"], options=["-Wall"]).log == built.log


def test_gxx_does_not_fuse_multiply_and_add(tmp_path: Path) -> None:
    """Also where the CPU could: (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 exactly, and 0 with the product rounded first."""
    (tmp_path / "a.cpp").write_text('extern "C" float multiply_add(float a, float b) { return a * a + b; }\n')
    for options in ([], ["-march=native"]):
        library = ctypes.CDLL(str(build_shared_library("a", [tmp_path / "a.cpp"], options=options).path))
        library.multiply_add.restype = ctypes.c_float
        answer = library.multiply_add(ctypes.c_float(1 + 2.0**-12), ctypes.c_float(-(1 + 2.0**-11)))
        assert answer == 0.0, options


def test_libcuxx_on_the_cpu_needs_only_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(
        ATOMIC
        + 'extern "C" unsigned long long add(unsigned long long* flag) {\n'
        + "    Flag(*flag).fetch_add(2, cuda::memory_order_acq_rel);\n"
        + "    return Flag(*flag).load(cuda::memory_order_acquire);\n}\n"
    )
    built = build_shared_library(
        "a", [tmp_path / "a.cpp"], include_dirs=[cccl_include_dir()], options=["-Wall", "-Wextra"]
    )
    assert built.log == ""
    flag = ctypes.c_ulonglong(40)
    add = ctypes.CDLL(str(built.path)).add
    add.restype = ctypes.c_ulonglong
    assert add(ctypes.byref(flag)) == flag.value == 42


def test_thread_sanitizer_sees_a_race(tmp_path: Path) -> None:
    """Options reach compiling and linking: a program with a race is told so, and with libcu++'s atomics it is quiet."""
    (tmp_path / "race.cpp").write_text(
        ATOMIC
        + "#include <thread>\n"
        + "unsigned long long flag = 0, data = 0;\n"
        + "int main() {\n"
        + "    std::thread other([] { data = 1; Flag(flag).store(1, ORDER); });\n"
        + "    while (Flag(flag).load(cuda::memory_order_acquire) == 0) {}\n"
        + "    data += 1;\n    other.join();\n    return data == 2 ? 0 : 1;\n}\n"
    )
    codes = {}
    for order in ("release", "relaxed"):
        program = build_shared_library(
            f"race_{order}",
            [tmp_path / "race.cpp"],
            options=["-fsanitize=thread", "-g", "-O1", f"-DORDER=cuda::memory_order_{order}"],
            include_dirs=[cccl_include_dir()],
            executable=True,
        )
        done = subprocess.run([program.path], capture_output=True, text=True, timeout=60)
        codes[order] = (done.returncode, "data race" in done.stderr)
    assert codes == {"release": (0, False), "relaxed": (66, True)}


def test_missing_cccl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_distribution(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", no_distribution)
    monkeypatch.setattr(sources, "_toolkits", lambda: iter([Path("/no/such/toolkit")]))
    with pytest.raises(FileNotFoundError, match=r"pip install 'nvidia-cuda-cccl==13\.0\.\*'.*CUDA_HOME.*/no/such"):
        cccl_include_dir()


def test_missing_gxx_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.cpp").write_text("")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no g\+\+ on PATH; install g\+\+ 11 or newer"):
        build_shared_library("a", [tmp_path / "a.cpp"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(FileNotFoundError, match="CXX is 'no-such-compiler'"):
        build_shared_library("a", [tmp_path / "a.cpp"])
