#!/bin/sh
# Train on the GPUs of this machine:  [GPUS=0,1] sh scripts/gpu.sh [--key value ...]
# Without GPUS it takes every GPU that it can see. Several GPUs are trained on with one process each.
set -eu
cd -- "$(dirname -- "$0")/.."
python=${PYTHON:-python}

if [ -z "${GPUS:-}" ]; then
    GPUS=$("$python" -c 'import torch; print(*range(torch.cuda.device_count()), sep=",")')
fi
if [ -z "$GPUS" ]; then
    echo "gpu.sh: no GPU is visible to torch; use scripts/cpu.sh, or look at the output of nvidia-smi" >&2
    exit 1
fi

case " $* " in
*" --config"* | *" -c "*) ;;
*) set -- --config configs/default.yaml "$@" ;;
esac
case $GPUS in
*,*)
    count=$(printf '%s\n' "$GPUS" | tr ',' '\n' | grep -c .)
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$count" \
        train.py --gpu_ids "$GPUS" "$@"
    ;;
*)
    exec "$python" train.py --gpu_ids "$GPUS" "$@"
    ;;
esac
