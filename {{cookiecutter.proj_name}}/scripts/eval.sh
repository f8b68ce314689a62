#!/bin/sh
# Evaluate a checkpoint:  sh scripts/eval.sh --model_pt PATH [--key value ...]     (or the path alone, first)
# The config is the one inside the checkpoint.
set -eu

case ${1-} in
"" | -*) ;;
*) set -- --model_pt "$@" ;;
esac
# Make the path absolute, because the working folder changes below.
option=
for word do
    shift
    path=${word#--model_pt=}
    if [ "$option" = --model_pt ] || [ "$path" != "$word" ]; then
        case $path in
        /*) ;;
        *) if [ -e "$path" ]; then word=${word%"$path"}$PWD/$path; fi ;;
        esac
    fi
    set -- "$@" "$word"
    option=$word
done
cd -- "$(dirname -- "$0")/.."

exec "${PYTHON:-python}" evaluate.py "$@"
