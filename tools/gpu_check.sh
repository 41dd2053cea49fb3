#!/bin/sh
# Check and measure the built CUDA variant on this machine's GPU: under 8 minutes on an H200, nothing from a network.
#
#   make variants                 on any x86_64 Linux machine, with or without a GPU
#   tools/gpu_check.sh [--out FOLDER] [--seconds 420] [--only JOB ...]
#
# The most telling facts come first, within a minute, and the files are written after every job (tools/gpu/check.py).
# Needs on the GPU's machine:
#   - python3 (PYTHON names another one) with a CUDA build of torch 2.11 or later, and the Triton that it brings;
#   - a C compiler and Python.h, with which Triton builds its driver and each kernel's launcher;
#   - of this clone tools/, tests/ and benchmarks/, and of build/, which git ignores, the variant of torch's CUDA.
# Taken where they are there: transformers and kernels (whole models), compute-sanitizer, and FLA, flash-attn, mamba-ssm
# and causal-conv1d (speed beside ours). pytest is not needed.
# Writes FOLDER/gpu.json and FOLDER/gpu.txt and prints the table; ends with 0 if all that ran was right, 1 if something
# was wrong, 2 if nothing could be run.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" tools/gpu/check.py "$@"
