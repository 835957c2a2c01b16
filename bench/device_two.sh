#!/bin/bash
# Two GPUs of compute capability 9.0, one rank each under torchrun, beside the baseline and an installed deep_gemm.
#   bash bench/device_two.sh [full|sustained|named]   figures go to $OUT (default: runs/bench); without a word: all three
# Wheels in .whl/ (sgl-deep-gemm and what it needs) are installed to /tmp/site; without them the peer is a skipped row.
#   full       7168/2048 top-8 at nine token counts, bursts and cold
#   sustained  7168/2048 top-8 and 4096/2048 top-6 at 8192 tokens, contenders in turn for seconds
#   named      4096/2048 top-6 at 128 and 8192 tokens, 7168/3072 top-6 (48 experts) at 128 and 8192
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER OMP_NUM_THREADS=8
export MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
OUT="${OUT:-runs/bench}"
mkdir -p "$OUT"
limit="${LIMIT_S:-560}"
started=$SECONDS
if compgen -G '.whl/*.whl' >/dev/null && [ ! -d /tmp/site/deep_gemm ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
fi
[ -d /tmp/site ] && export PYTHONPATH="$PYTHONPATH:/tmp/site"
failed=0

# part NAME LIMIT options...: one run of the benchmark
part() {
  local name=$1 most=$2 left=$((limit - (SECONDS - started)))
  shift 2
  ((left < most)) && most=$left
  if ((most < 20)); then
    echo "NOT RUN $name: no time left"
    failed=1
    return
  fi
  timeout -k 5 "$most" python3 -m torch.distributed.run --nproc-per-node "${RANKS:-2}" --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:0 -m bench moe --out "$OUT" --name "$name" "$@" 2>&1 | tee -a "$OUT/bench.log" | cut -c1-220
  local rc=${PIPESTATUS[0]}
  echo "$name: exit $rc, $((SECONDS - started)) s since the start"
  ((rc)) && failed=1
}

for name in ${*:-full sustained named}; do
  case $name in
    full) part full 330 --shape deepseek-v3 --accumulate both --regime bursts,cold --seconds 0.3 ;;
    sustained) part sustained 120 --shape deepseek-v3,v4-flash --tokens 8192 --regime sustained --sustained-seconds 4 --no-picture ;;
    named)
      part v4-flash 100 --shape v4-flash --tokens 128,8192 --regime bursts,cold --seconds 0.3 --no-picture
      part v4-pro 100 --shape v4-pro --experts-per-rank 48 --tokens 128,8192 --regime bursts,cold --seconds 0.3 --no-picture
      ;;
    *)
      echo "no part named $name" >&2
      exit 2
      ;;
  esac
done
exit $failed
