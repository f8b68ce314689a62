#!/bin/sh
# Evaluate a checkpoint:  sh scripts/eval.sh --model_pt PATH [--key value ...]     (or the path alone, first)
# The config is the one inside the checkpoint.
set -eu

case ${1-} in
"" | -*) ;;
*) set -- --model_pt "$@" ;;
esac

exec "${PYTHON:-python}" "$(dirname -- "$0")/../evaluate.py" "$@"
