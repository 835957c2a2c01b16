#!/bin/bash
# One call on a machine with two GPUs of compute capability 9.0: the proof of the protocol, then the host phases.
#   bash tests/device/protocol.sh          from the root of the checkout; logs go to $OUT (default: runs/device)
# Ends within 590 s, and leaves at most eight files. The table comes last. Exit code 0: every step passed.
set -u
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH=. PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
OUT="${OUT:-runs/device}"
mkdir -p "$OUT"
started=$SECONDS
limit=585
failed=0
table=$(mktemp)

# step NAME LIMIT COMMAND...: its output in NAME.log, its result in the table
step() {
  local name=$1 most=$2 began=$SECONDS rc
  shift 2
  local left=$((limit - (SECONDS - started)))
  ((left < most)) && most=$left
  if ((most < 10)); then
    echo "NOT RUN  $name: no time left" >>"$table"
    failed=1
    return
  fi
  timeout -k 5 "$most" "$@" >>"$OUT/$name.log" 2>&1
  rc=$?
  if ((rc == 0)); then
    echo "ok       $name  $((SECONDS - began)) s" >>"$table"
  else
    echo "FAIL $rc   $name  $((SECONDS - began)) s (124, 137: past $most s)" >>"$table"
    failed=1
  fi
}

{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  nvidia-smi topo -m
  python3 -c 'import sys, torch; print(sys.version, torch.__version__)'
  python3 -m pip list 2>/dev/null | grep -i -E '^(cuda|nvidia-cuda)'
} >"$OUT/build.log" 2>&1
head -n 2 "$OUT/build.log" >>"$table"

step build 150 python3 -c 'from megamoe.targets import host, sm90; sm90.build_all(); host.build_all()'
for gpus in 1 2; do
  for ranks in 2 8; do
    step "proof-${gpus}gpu-${ranks}ranks" 90 \
      python3 -X faulthandler -m megamoe.protocol_proof --ranks "$ranks" --gpus "$gpus" --watchdog-s 85
  done
done
step host-phases 300 python3 -m harness run --target host --ranks 1,2,8

# Deliberate faults, while time is left: the proof must see those that the GPU shows. Relaxed orders may pass by luck.
for mutation in arrival_one_too_few mask_bit_missing combine_before_done publish_before_list relaxed_wait relaxed_arrival; do
  ((limit - (SECONDS - started) < 40)) && break
  MEGAMOE_SM90_OPTIONS="-DMEGAMOE_MUTATION=$mutation" timeout -k 5 35 python3 -m megamoe.protocol_proof \
    --ranks 8 --gpus 2 --epochs 70 --cases epochs-512 --watchdog-s 30 >"$table.log" 2>&1
  echo "mutation $mutation: exit $? (1: seen) $(grep -h ^FAIL "$table.log" | cut -c1-160)" >>"$table"
  { echo "== $mutation"; cat "$table.log"; } >>"$OUT/mutations.log"
done

grep -h -E '^(ok|FAIL|HUNG|     |[0-9]+ of)' "$OUT"/proof-*.log | cut -c1-150
grep -h -E '^(FAIL|HUNG)' "$OUT"/proof-*.log | cut -c1-400
for log in "$OUT"/build.log "$OUT"/proof-*.log; do
  grep -q -E 'Traceback|HUNG|Timeout' "$log" && { echo "--- $log"; tail -n 25 "$log" | cut -c1-300; }
done
echo "--- host phases"
tail -n 25 "$OUT/host-phases.log" 2>/dev/null | cut -c1-200
[ -d runs ] && tar czf "$OUT/runs.tar.gz" --exclude=device runs
cat "$table"
exit $failed
