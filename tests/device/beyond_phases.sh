#!/bin/bash
# One call on a machine with two GPUs of compute capability 9.0: what target sm90 must do beyond the phases.
#   bash tests/device/beyond_phases.sh [STEP ...]     from the root of the checkout; logs go to $OUT (default: runs/device)
# Without a STEP (names below) all of them, most important first. LIMIT_S (default 480) ends everything; SOAK_SECONDS 80,
# SOAK_SEED 1. Leaves at most eight files. The table comes last. Exit code 0: every step passed. The deliberate faults
# (no_fence, relaxed_tile_counter, relaxed_arrival) pass whether they were "seen" or "NOT SEEN": a GPU need not show them.
set -u
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH=. PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 GLOO_SOCKET_IFNAME=lo
OUT="${OUT:-runs/device}"
SOAK_SECONDS="${SOAK_SECONDS:-80}"
SOAK_SEED="${SOAK_SEED:-1}"
limit="${LIMIT_S:-480}"
alone=(host_cost) # on GPU 0; what the host does beside it would count
on_gpu0=(fill graphs several host_views foreign rerun_fast)
on_gpu1=(memcheck synccheck initcheck racecheck_minimal racecheck memcheck-fast)
on_both=(faults litmus soak rerun worlds replay_faults no_fence relaxed_tile_counter relaxed_arrival soak-fast soak-nccl)
wanted=" ${*:-${alone[*]} ${on_gpu0[*]} ${on_gpu1[*]} ${on_both[*]}} "
for name in $wanted; do
  [[ " ${alone[*]} ${on_gpu0[*]} ${on_gpu1[*]} ${on_both[*]} " == *" $name "* ]] || {
    echo "no step named $name" >&2
    exit 2
  }
done
mkdir -p "$OUT"
rm -f "$OUT"/{build,gpu0,gpu1,both}.log "$OUT"/*.table
started=$SECONDS

# run NAME LIMIT COMMAND...: its output at the end of $log; its exit code and seconds in a line of the lane's table
run() {
  local name=$1 most=$2 began=$SECONDS rc word
  shift 2
  local left=$((limit - (SECONDS - started)))
  ((left < most)) && most=$left
  echo "##### $name" >>"$log"
  if ((most < 12)); then
    echo "NOT RUN  $name: no time left" >>"$log.table"
    return
  fi
  timeout -k 15 "$most" "$@" >>"$log" 2>&1
  rc=$?
  word="ok      "
  ((rc == 0)) || word="FAIL $rc"
  echo "$word $name  $((SECONDS - began)) s of $most" >>"$log.table"
}
soak() { # NAME LIMIT OPTIONS...
  run "$1" "$2" python3 -m torch.distributed.run --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 \
    --local-addr=127.0.0.1 --max-restarts=0 tests/device/soak.py --seed "$SOAK_SEED" "${@:3}"
}
sanitizer() { # NAME LIMIT TOOL ACCUMULATE
  local only=() api=()
  # cuda-python asks the driver for entry points that it may not have (cuGetProcAddress_v2: "invalid argument"); that is
  # no fault, but memcheck counts it as one. What this layer calls is checked where it is called.
  [ "$3" = memcheck ] && api=(--report-api-errors no)
  # initcheck has to see who writes, the others need only look at this layer's kernels.
  [ "$3" != initcheck ] && compute-sanitizer --help 2>&1 | grep -q -- --kernel-regex && only=(--kernel-regex kns=megamoe)
  # Lazily: loading all of torch's kernels under the tool takes longer than the run. One allocation a tensor: the tool
  # sees where each ends.
  run "$1" "$2" env CUDA_MODULE_LOADING=LAZY PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$3" \
    "${only[@]}" "${api[@]}" --print-limit 20 --error-exitcode 9 python3 tests/device/small_run.py "$4"
}
step() {
  [[ "$wanted" == *" $1 "* ]] || return
  case $1 in
    memcheck | synccheck | initcheck) sanitizer "$1" 75 "$1" fp32 ;;
    racecheck_minimal) run "$1" 60 python3 tests/device/racecheck.py minimal ;;
    racecheck) run "$1" 90 python3 tests/device/racecheck.py kernel ;;
    memcheck-fast) sanitizer "$1" 60 memcheck fast ;;
    soak) soak "$1" $((SOAK_SECONDS + 45)) --seconds "$SOAK_SECONDS" ;;
    soak-fast) soak "$1" 50 --seconds 12 --launches 2000 --accumulate fast ;;
    soak-nccl) soak "$1" 45 --seconds 5 --launches 400 --backend nccl ;;
    rerun | rerun_fast | worlds | litmus | no_fence | relaxed_tile_counter | relaxed_arrival)
      run "$1" 110 python3 -X faulthandler tests/device/repeat_checks.py "$1"
      ;;
    *) run "$1" 70 python3 -X faulthandler tests/device/more_checks.py "$1" ;;
  esac
}

log="$OUT/build.log"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >"$log" 2>&1
run build 150 python3 -c 'from megamoe.targets import host, sm90; sm90.build_all(); host.build_all()'
builds=()
for mutation in relaxed_tile_counter relaxed_arrival; do # so that those steps need not wait for the compiler
  MEGAMOE_SM90_OPTIONS="-DMEGAMOE_MUTATION=$mutation" timeout -k 5 100 \
    python3 -c 'from megamoe.targets import sm90; sm90.build_fused(1, 128, False, False)' >>"$log.tests" 2>&1 &
  builds+=($!)
done
if [[ "$wanted" == *" racecheck "* ]]; then # with line numbers
  for bring_up in False True; do
    MEGAMOE_SM90_OPTIONS=-lineinfo timeout -k 5 100 \
      python3 -c "from megamoe.targets import sm90; sm90.build_fused(1, 128, $bring_up, False)" >>"$log.tests" 2>&1 &
    builds+=($!)
  done
fi
wait "${builds[@]}"
(
  export CUDA_VISIBLE_DEVICES=0
  log="$OUT/gpu0.log"
  for name in "${alone[@]}"; do step "$name"; done
)
(
  export CUDA_VISIBLE_DEVICES=0
  log="$OUT/gpu0.log"
  for name in "${on_gpu0[@]}"; do step "$name"; done
) &
first=$!
(
  export CUDA_VISIBLE_DEVICES=1
  log="$OUT/gpu1.log"
  for name in "${on_gpu1[@]}"; do step "$name"; done
) &
second=$!
wait "$first" "$second"
cat "$log.tests" >>"$log" && rm -f "$log.tests"
log="$OUT/both.log"
for name in "${on_both[@]}"; do step "$name"; done

logs=()
for name in build gpu0 gpu1 both; do [ -f "$OUT/$name.log" ] && logs+=("$OUT/$name.log"); done
grep -a -h -E '^(WRONG|RACE|false|seen|NOT SEEN|rank [0-9]+:|       )|Error|=========.*(error|hazard|ERROR SUMMARY|RACECHECK SUMMARY)|a call costs' \
  "${logs[@]}" | cut -c1-230 | sort | uniq -c | sort -rn | head -n 40
echo "claims that hold: $(cat "${logs[@]}" | grep -a -c '^ok   ')"
head -n 1 "$OUT/build.log"
table=$(cat "$OUT"/{build,gpu0,gpu1,both}.log.table 2>/dev/null)
rm -f "$OUT"/*.table
echo "$table"
echo "total $((SECONDS - started)) s"
! grep -q -E '^(FAIL|NOT RUN)' <<<"$table"
