#!/bin/bash
# Two GPUs of compute capability 9.0, one rank each under torchrun, beside an installed deep_gemm.
#   bash bench/device_two.sh [must|full|sustained|named ...]     figures go to $OUT (default: runs/bench); default: must
# Wheels in .whl/ (sgl-deep-gemm and what it needs) are installed to /tmp/site; without them the peer is a skipped row.
#   must       issue 3, item 6: 7168/2048 top-8 at 1 … 8192 tokens and 4096/2048 top-6 at 128 and 8192, both accumulations and
#              the peer in turn in one process, cold single calls and sustained; within 270 s
#   full       7168/2048 top-8 at nine token counts, bursts and cold, also beside the baseline of torch and NCCL
#   sustained  7168/2048 top-8 and 4096/2048 top-6 at 8192 tokens, contenders in turn for 4 s each
#   named      4096/2048 top-6 at 128 and 8192 tokens, 7168/3072 top-6 (48 experts) at 128 and 8192
# LIMIT_S (default: 265 for must alone, else 560) ends everything; rows are in $OUT/*.json as soon as they are measured,
# and the short table that comes last is made from those.
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER OMP_NUM_THREADS=8
export MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
OUT="${OUT:-runs/bench}"
mkdir -p "$OUT"
parts=("${@:-must}")
for name in "${parts[@]}"; do
  case $name in must | full | sustained | named) ;; *)
    echo "no part named $name" >&2
    exit 2
    ;;
  esac
done
[ "${parts[*]}" = must ] && limit="${LIMIT_S:-265}" || limit="${LIMIT_S:-560}"
started=$SECONDS
if compgen -G '.whl/*.whl' >/dev/null && [ ! -d /tmp/site/deep_gemm ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl ||
    echo "pip could not install .whl: no peer"
fi
[ -d /tmp/site ] && export PYTHONPATH="$PYTHONPATH:/tmp/site"
failed=0

left() { echo $((limit - 8 - (SECONDS - started))); }
# part NAME LIMIT options...: one run of the benchmark
part() {
  local name=$1 most=$2 rc
  shift 2
  (($(left) < most)) && most=$(left)
  if ((most < 20)); then
    echo "NOT RUN $name: no time left"
    failed=1
    return
  fi
  timeout -k 10 "$most" python3 -m torch.distributed.run --nproc-per-node "${RANKS:-2}" --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 --max-restarts 0 -m bench moe --out "$OUT" --name "$name" "$@" 2>&1 |
    tee -a "$OUT/bench.log" | stdbuf -oL cut -c1-200
  rc=${PIPESTATUS[0]}
  echo "$name: exit $rc, $((SECONDS - started)) s since the start"
  ((rc)) && failed=1
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader | tee "$OUT/bench.log"
# Both kernels side by side, before any rank waits for the other's compiler.
timeout -k 5 120 python3 - <<'PYTHON' 2>&1 | tee -a "$OUT/bench.log"
from concurrent.futures import ThreadPoolExecutor

from megamoe.targets import sm90

with ThreadPoolExecutor() as pool:
    building = [pool.submit(sm90.build_fused, 1, 128, False, fast) for fast in (False, True)]
    print("; ".join(f"built in {one.result().seconds:.1f} s {sm90.resource_faults(one.result())}" for one in building))
PYTHON
echo "kernels: $((SECONDS - started)) s since the start"

for name in "${parts[@]}"; do
  case $name in
    must)
      # What the issue judges first comes first.
      part deepseek-v3 200 --shape deepseek-v3 --tokens 8192,128,1024,1,512,32 --accumulate fp32,fast --beside deep_gemm \
        --regime sustained,cold --seconds 0.3 --sustained-seconds 2.4 --no-picture
      part v4-flash 90 --shape v4-flash --tokens 8192,128 --accumulate fp32,fast --beside deep_gemm \
        --regime sustained,cold --seconds 0.3 --sustained-seconds 2.4 --no-picture
      ;;
    full) part full 330 --shape deepseek-v3 --regime bursts,cold --seconds 0.3 ;;
    sustained) part sustained 120 --shape deepseek-v3,v4-flash --tokens 8192 --regime sustained --no-picture ;;
    named)
      part v4-flash-named 100 --shape v4-flash --tokens 128,8192 --regime bursts,cold --seconds 0.3 --no-picture
      part v4-pro 100 --shape v4-pro --experts-per-rank 48 --tokens 128,8192 --regime bursts,cold --seconds 0.3 --no-picture
      ;;
  esac
done
tables=("$OUT"/*.json)
if [ -f "${tables[0]}" ]; then
  echo "=== what was measured"
  python3 -m bench table "${tables[@]}" | cut -c1-220
else
  failed=1
fi
echo "total $((SECONDS - started)) s"
exit $failed
