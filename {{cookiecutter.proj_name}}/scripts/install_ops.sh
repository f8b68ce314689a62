#!/bin/sh
# Build the C++ and CUDA operators in custom/ops:  sh scripts/install_ops.sh
#
# Always builds C++, and CUDA if there are nvcc and a GPU. Run it again after an edit or an upgrade of PyTorch: it builds
# only what has changed. Without it, the operators run in Python. Environment variables:
#   FORCE_CUDA=1                     compile CUDA without a GPU, as on a cluster's login node; 0: leave CUDA out
#   TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"   the GPUs to compile for; default: those of this machine
#   CXX, CUDA_HOME                   the compilers        OPS_BUILD_DIR   another folder for the library
#   PYTHON                           the interpreter you train with
set -eu
cd -- "$(dirname -- "$0")/.."

case ${1:-} in
-h | --help) exec sed -n '/^# Build/,/^set/ { /^#/ { s/^# \{0,1\}//; p; }; }' "$0" ;;
?*)
    echo "install_ops.sh: $1: it takes no arguments; sh scripts/install_ops.sh --help" >&2
    exit 2
    ;;
esac
exec "${PYTHON:-python}" -m common.ops custom/ops
