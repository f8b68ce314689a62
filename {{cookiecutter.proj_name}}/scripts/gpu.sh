#!/bin/sh
# Train on the GPUs of this machine:  [GPUS=0,1] sh scripts/gpu.sh [--key value ...]
# Without GPUS it uses all visible GPUs; train.py starts one process per GPU.
set -eu
cd -- "$(dirname -- "$0")/.."

case " $* " in
*" --config"* | *" -c "*) ;;
*" --resume auto "* | *" --resume=auto "*) set -- --config configs/default.yaml "$@" ;;
*" --resume"*) ;; # the run has its config
*) set -- --config configs/default.yaml "$@" ;;
esac
exec "${PYTHON:-python}" train.py --gpu_ids "${GPUS:-all}" "$@"
