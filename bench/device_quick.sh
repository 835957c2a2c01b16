#!/bin/bash
# One GPU of compute capability 9.0: the layer of 7168/2048 top-8 with 32 experts on one rank, under 60 s once built.
#   bash bench/device_quick.sh [options of python -m bench moe]     figures go to $OUT (default: runs/bench)
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER
export MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe_cache}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
exec timeout -k 5 150 python3 -X faulthandler -m bench moe --ranks 1 --gpus 1 --shape deepseek-v3 \
  --tokens 1,8,128,512,2048,8192 --beside baseline --out "${OUT:-runs/bench}" "$@"
