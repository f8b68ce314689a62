#!/bin/sh
# Train on the CPU:  sh scripts/cpu.sh [--key value ...]
set -eu
cd -- "$(dirname -- "$0")/.."

case " $* " in
*" --config"* | *" -c "*) ;;
*) set -- --config configs/default.yaml "$@" ;;
esac
exec "${PYTHON:-python}" train.py --gpu_ids -1 "$@"
