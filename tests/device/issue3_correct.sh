#!/bin/bash
# One call on a machine with two GPUs of compute capability 9.0: phases 1 to 6 on target sm90, all kinds of ranks.
#   bash tests/device/issue3_correct.sh       from the root of the checkout; logs go to $OUT (default: runs/device)
# Ends within 415 s, and leaves at most eight files. The table comes last. Exit code 0: every step passed.
set -u
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH=. PYTHONUNBUFFERED=1 MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
OUT="${OUT:-runs/device}"
mkdir -p "$OUT"
started=$SECONDS
limit=405
failed=0
table=$(mktemp)

# run NAME LIMIT COMMAND...: its output in NAME.log; its exit code and seconds in NAME.end
run() {
  local name=$1 most=$2 began=$SECONDS rc
  shift 2
  local left=$((limit - (SECONDS - started)))
  ((left < most)) && most=$left
  if ((most < 10)); then
    rc="not run"
  else
    timeout -k 5 "$most" "$@" >"$OUT/$name.log" 2>&1
    rc=$?
  fi
  echo "$rc $((SECONDS - began))" >"$table.$name"
}
# harness NAME LIMIT GPUS OPTIONS...: the phases with these options, on these GPUs alone
harness() {
  local name=$1 most=$2 gpus=$3
  shift 3
  run "$name" "$most" env CUDA_VISIBLE_DEVICES="$gpus" \
    python3 -m harness run --target sm90 --plain --runs-dir "/tmp/runs-$name" "$@"
}

{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'import sys, torch; print(sys.version, torch.__version__)'
} >"$OUT/machine.log" 2>&1
run build 150 python3 -m harness build --target sm90
# Ranks on one GPU need one: two lanes side by side.
harness one-gpu 170 0 --ranks 1,2 --groups virtual &
harness one-gpu-8 170 1 --ranks 8 --groups virtual &
wait
harness two-gpus 200 0,1 --ranks 2 --groups process
harness two-gpus-8 150 0,1 --ranks 8 --groups spread

for name in one-gpu one-gpu-8 two-gpus two-gpus-8; do
  log="$OUT/$name.log"
  [ -f "$log" ] || continue
  echo "=== $name"
  grep -a -h -E 'FAILED|failed|timed out|flaky|blocked|skipped' "$log" | cut -c1-260 | head -n 25
  for step in /tmp/runs-"$name"/*/phase*; do
    [ -d "$step" ] || continue
    grep -a -h -E '^(FAILED|phase )|^    rank ' "$step"/*.log 2>/dev/null | cut -c1-260 | head -n 12
  done
done
tar czf "$OUT/runs.tar.gz" -C /tmp $(cd /tmp && ls -d runs-* 2>/dev/null) 2>/dev/null
head -n 1 "$OUT/machine.log" >>"$table"
for name in build one-gpu one-gpu-8 two-gpus two-gpus-8; do
  read -r rc seconds <"$table.$name"
  [ "$rc" = 0 ] || failed=1
  passed=$(cat /tmp/runs-"$name"/*/results.jsonl 2>/dev/null | grep -c '"status": *"passed"')
  printf '%-10s exit %-8s %4s s  lines passed: %s\n' "$name" "$rc" "$seconds" "$passed" >>"$table"
done
echo "total $((SECONDS - started)) s" >>"$table"
cat "$table"
exit $failed
