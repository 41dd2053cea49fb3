#!/bin/sh
# Check and measure the built CUDA variant on this machine's GPU: under 8 minutes on an H200, nothing from a network.
#
#   make variants                 on any x86_64 Linux machine, with or without a GPU
#   tools/gpu_check.sh [--out FOLDER] [--seconds 420] [--only JOB ...]
#
# Needs a python3 with a CUDA build of torch (PYTHON names another one); pytest and the Hub libraries are not needed.
# Writes FOLDER/gpu.json and FOLDER/gpu.txt and prints the table; ends with 0 if all that ran was right, 1 if something
# was wrong, 2 if nothing could be run.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" tools/gpu/check.py "$@"
