#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on several machines: run this same command on each of them.
#
#   HEAD=10.0.0.1 MACHINES=8 DATA=/shared/data OUT=/shared/run \
#       examples/launch/many_machines.sh --recipe paper-tuned
#
# DATA and OUT lie on storage that all machines share. HEAD is the address of one machine, the same on all.
# MACHINES may be a range (6:8): if a machine is lost, the run then continues with fewer, on the same data,
# as long as the number of processes divides the batch.
set -euo pipefail

: "${HEAD:?address of the rendezvous machine}"
: "${MACHINES:?how many machines, or a range such as 6:8}"
: "${DATA:?folder written by sparse-bitnet prepare, shared}"
: "${OUT:?run folder, shared}"
PORT="${PORT:-29400}"
JOB="${JOB:-sparse-bitnet}"
PROCESSES="${PROCESSES:-gpu}"
RESTARTS="${RESTARTS:-10}"
# Without this, a machine that joins later waits for an address that it never receives.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# By default all processes split the model. On a slow network, --shard 8 can be faster: the 8 processes of
# a machine split the model, and the machines replicate it.
exec torchrun --nnodes "$MACHINES" --nproc-per-node "$PROCESSES" --max-restarts "$RESTARTS" \
    --rdzv-id "$JOB" --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" \
    -m sparse_bitnet train --data "$DATA" --out "$OUT" "$@"
