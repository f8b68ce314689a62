#!/bin/sh
# Evaluate a checkpoint:  sh scripts/eval.sh MODEL_PT [--key value ...]
# The config is taken from the checkpoint's run folder.
set -eu

if [ $# -eq 0 ]; then
    echo "usage: sh scripts/eval.sh MODEL_PT [--key value ...]" >&2
    exit 2
fi
model=$1
shift
# Make the path absolute, because the working folder changes below.
case $model in
/*) ;;
*) if [ -e "$model" ]; then model=$PWD/$model; fi ;;
esac
cd -- "$(dirname -- "$0")/.."

exec "${PYTHON:-python}" evaluate.py --model_pt "$model" "$@"
