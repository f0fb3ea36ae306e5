#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on all GPUs of one machine (on a machine without: on PROCESSES processes of the CPU).
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
# Without this, processes that are started again wait for addresses of those that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --standalone --nproc-per-node "$PROCESSES" --max-restarts "$RESTARTS" \
    -m sparse_bitnet train --data "$DATA" --out "$OUT" "$@"
