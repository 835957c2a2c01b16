#!/bin/bash
# One call on a machine with two GPUs of compute capability 9.0: what target sm90 must do beyond the phases.
#   bash tests/device/issue3_more.sh          from the root of the checkout; logs go to $OUT (default: runs/device)
# Ends within 395 s, and leaves at most eight files. The table comes last. Exit code 0: every step passed.
set -u
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH=. PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 GLOO_SOCKET_IFNAME=lo
OUT="${OUT:-runs/device}"
SOAK_SECONDS="${SOAK_SECONDS:-50}"
mkdir -p "$OUT"
started=$SECONDS
limit=385
table=$(mktemp)

# run NAME LIMIT COMMAND...: its output at the end of $log; its exit code and seconds in a line of the lane's table
run() {
  local name=$1 most=$2 began=$SECONDS rc word
  shift 2
  local left=$((limit - (SECONDS - started)))
  ((left < most)) && most=$left
  echo "##### $name" >>"$log"
  if ((most < 8)); then
    echo "NOT RUN  $name: no time left" >>"$log.table"
    return
  fi
  timeout -k 5 "$most" "$@" >>"$log" 2>&1
  rc=$?
  word="ok      "
  ((rc == 0)) || word="FAIL $rc"
  echo "$word $name  $((SECONDS - began)) s of $most" >>"$log.table"
}
check() { run "$1" "$2" python3 -X faulthandler tests/device/more_checks.py "$1"; }
sanitizer() {
  local only=()
  compute-sanitizer --help 2>&1 | grep -q -- --kernel-regex && only=(--kernel-regex kns=megamoe)
  # Lazily: loading all of torch's kernels under the tool takes longer than the run.
  run "sanitizer-$1" "$2" env CUDA_MODULE_LOADING=LAZY compute-sanitizer --tool "$1" "${only[@]}" --print-limit 20 \
    --error-exitcode 9 python3 tests/device/small_run.py
}
soak() { # NAME LIMIT OPTIONS...
  run "$1" "$2" python3 -m torch.distributed.run --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 \
    --local-addr=127.0.0.1 --max-restarts=0 tests/device/soak.py "${@:3}"
}

log="$OUT/build.log"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >"$log" 2>&1
run build 130 python3 -c 'from megamoe.targets import sm90; sm90.build_all()'
(
  export CUDA_VISIBLE_DEVICES=0
  log="$OUT/gpu0.log"
  for name in fill graphs host_cost several foreign; do check "$name" 60; done
) &
first=$!
(
  export CUDA_VISIBLE_DEVICES=1
  log="$OUT/gpu1.log"
  for tool in memcheck synccheck initcheck racecheck; do sanitizer "$tool" 45; done
) &
second=$!
wait "$first" "$second"
log="$OUT/both.log"
check faults 50
check replay_faults 40
check litmus 45
soak soak $((SOAK_SECONDS + 40)) --seconds "$SOAK_SECONDS" --seed "${SOAK_SEED:-1}"
check rerun 90
soak soak-nccl 45 --seconds 5 --launches 400 --backend nccl
check litmus_broken 80

grep -a -h -E '^(WRONG|seen|NOT SEEN|rank [0-9]+:|       )|Traceback|Error|=========.*(error|hazard|ERROR SUMMARY|RACECHECK SUMMARY)|a call costs' \
  "$OUT"/gpu0.log "$OUT"/gpu1.log "$OUT"/both.log | sort | uniq -c | sort -rn | cut -c1-260 | head -n 70
for name in build gpu0 gpu1 both; do cat "$OUT/$name.log.table" 2>/dev/null; rm -f "$OUT/$name.log.table"; done >"$table"
grep -a -h -c '^ok   ' "$OUT"/*.log | paste -sd+ | bc 2>/dev/null | sed 's/^/claims that hold: /'
head -n 1 "$OUT/build.log"
cat "$table"
echo "total $((SECONDS - started)) s"
! grep -q -E '^(FAIL|NOT RUN)' "$table"
