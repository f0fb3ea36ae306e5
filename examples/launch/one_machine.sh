#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on all GPUs of one machine (without GPUs: in PROCESSES processes on the CPU).
#
#   DATA=data OUT=run PROCESSES=8 examples/launch/one_machine.sh --recipe paper-tuned
#
# If a process dies, torchrun starts all of them again, up to RESTARTS times, and the run resumes from its
# newest checkpoint. After an interruption, run the same command again.
set -euo pipefail

: "${DATA:?folder written by sparse-bitnet prepare}"
: "${OUT:?run folder}"
PROCESSES="${PROCESSES:-gpu}"
RESTARTS="${RESTARTS:-3}"
# Without this, restarted processes wait for the addresses of those that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --standalone --nproc-per-node "$PROCESSES" --max-restarts "$RESTARTS" \
    -m sparse_bitnet train --data "$DATA" --out "$OUT" "$@"
