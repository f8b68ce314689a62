#!/bin/sh
# Evaluate a checkpoint:  sh scripts/eval.sh MODEL_PT [--key value ...]
# The configuration is found in the run folder of the checkpoint.
set -eu

if [ $# -eq 0 ]; then
    echo "usage: sh scripts/eval.sh MODEL_PT [--key value ...]" >&2
    exit 2
fi
model=$1
shift
# A path given from where the user stands must still be right after the change of folder.
case $model in
/*) ;;
*) if [ -e "$model" ]; then model=$PWD/$model; fi ;;
esac
cd -- "$(dirname -- "$0")/.."

exec "${PYTHON:-python}" evaluate.py --model_pt "$model" "$@"
