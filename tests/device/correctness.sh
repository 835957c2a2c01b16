#!/bin/bash
# One call on a machine with two GPUs of compute capability 9.0: phases 1 to 6 on target sm90, all kinds of ranks.
#   bash tests/device/correctness.sh [PHASES]     from the root of the checkout; logs go to $OUT (default: runs/device)
# PHASES as the harness takes them (3-5); all by default, else these alone, without their gates. LIMIT_S (default 480) ends
# everything. Leaves at most eight files. The table comes last. Exit code 0: every step passed.
set -u
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH=. PYTHONUNBUFFERED=1 MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 GLOO_SOCKET_IFNAME=lo
OUT="${OUT:-runs/device}"
mkdir -p "$OUT"
started=$SECONDS
limit="${LIMIT_S:-480}"
failed=0
ends=$(mktemp -d)
lanes=(one-gpu one-gpu-8 two-gpus two-gpus-8)
only=()
(($#)) && only=(--phases "$1" --no-gates)

# run NAME LIMIT COMMAND...: its output in NAME.log; its exit code and seconds in a file
run() {
  local name=$1 most=$2 began=$SECONDS rc
  shift 2
  local left=$((limit - (SECONDS - started)))
  ((left < most)) && most=$left
  if ((most < 15)); then
    rc="not-run"
  else
    timeout -k 20 "$most" "$@" >"$OUT/$name.log" 2>&1
    rc=$?
  fi
  echo "$rc $((SECONDS - began))" >"$ends/$name"
}
# phases NAME LIMIT GPUS OPTIONS...: the phases with these options, on these GPUs alone
phases() {
  local name=$1 most=$2 gpus=$3
  shift 3
  rm -rf "/tmp/runs-$name"
  run "$name" "$most" env CUDA_VISIBLE_DEVICES="$gpus" \
    python3 -m harness run --target sm90 --plain --runs-dir "/tmp/runs-$name" "${only[@]}" "$@"
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >"$OUT/machine.log" 2>&1
python3 -c 'import sys, torch; print(sys.version, torch.__version__)' >>"$OUT/machine.log" 2>&1
run build 170 python3 -m harness build --target sm90 --runs-dir /tmp/runs-build
# Ranks on one GPU need one: two lanes side by side.
phases one-gpu 230 0 --ranks 1,2 --groups virtual &
phases one-gpu-8 230 1 --ranks 8 --groups virtual &
wait
phases two-gpus 200 0,1 --ranks 2 --groups process
phases two-gpus-8 150 0,1 --ranks 8 --groups spread

# What the scripts said of failures, from the logs of the ranks; dumps of tensors stay behind, they are large.
for name in "${lanes[@]}"; do
  for step in /tmp/runs-"$name"/*/phase*; do
    [ -d "$step" ] || continue
    lines=$(grep -a -h -E '^ *FAILED|^    (rank|lacks)|Error:|MegaMoEFault' -r "$step" --include='*.log' 2>/dev/null | cut -c1-230 | head -n 6)
    [ -n "$lines" ] && echo "--- $name $(basename "$step")" && echo "$lines"
  done
done | tail -n 45
(cd /tmp && find runs-one-gpu runs-one-gpu-8 runs-two-gpus runs-two-gpus-8 -type f -size -2M ! -name '*.pt' 2>/dev/null |
  tar czf "$OUT/runs.tar.gz" -T -)
head -n 1 "$OUT/machine.log"
python3 tests/device/phase_table.py one-gpu=/tmp/runs-one-gpu one-gpu-8=/tmp/runs-one-gpu-8 two-gpus=/tmp/runs-two-gpus \
  two-gpus-8=/tmp/runs-two-gpus-8 || failed=1
for name in build "${lanes[@]}"; do
  read -r rc seconds <"$ends/$name"
  [ "$rc" = 0 ] || failed=1
  echo "$name: exit $rc, $seconds s"
done
echo "total $((SECONDS - started)) s"
exit $failed
