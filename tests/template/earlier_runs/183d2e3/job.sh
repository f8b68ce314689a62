#!/bin/sh
# Repeats the run old of 2026-11-26T04:48:40+00:00, under the name old_replicate.
# Further arguments are appended:  sh job.sh --progress.epoch 3
set -eu
run=$(CDPATH="" cd -P -- "$(dirname -- "$0")" && pwd)
project="$run/../.."
python=${PYTHON:-python}  # PYTHON=... sh job.sh uses another interpreter
cd -- "$project" || exit 1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:=1}"
exec "$python" train.py --config "$run/config.yaml" \
    --name old_replicate --dist.random_seed 42 "$@"
