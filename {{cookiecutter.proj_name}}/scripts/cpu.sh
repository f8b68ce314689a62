#!/bin/sh
# Train on the CPU:  sh scripts/cpu.sh [--key value ...]
set -eu
cd -- "$(dirname -- "$0")/.."

case " $* " in
*" --config"* | *" -c "*) ;;
*" --resume auto "* | *" --resume=auto "*) set -- --config configs/default.yaml "$@" ;;
*" --resume"*) ;; # the run has its config
*) set -- --config configs/default.yaml "$@" ;;
esac
exec "${PYTHON:-python}" train.py --gpu_ids -1 "$@"
