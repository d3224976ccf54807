# shellcheck shell=bash
# Sourced by scripts that start octet on this node. Needs `octet`, the program. Sets
#   gpus    how many GPUs there are that it can use
#   device  cuda or cpu: run.device of what is to be measured
#   launch  what starts ranks: "${launch[@]}" -np RANKS "$octet" …
# OCTET_CPU=1 in the environment leaves GPUs alone.
gpus=0
: "${octet:?}"
if [ -z "${OCTET_CPU:-}" ] && [[ $("$octet" --version) != *'without CUDA'* ]]; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
fi
# shellcheck disable=SC2034
device=$([ "$gpus" -gt 0 ] && echo cuda || echo cpu)
launch=(mpirun --bind-to none --oversubscribe)
if [ "$(id -u)" -eq 0 ]; then launch+=(--allow-run-as-root); fi
# CPU ranks may share few cores: one that waits gives way, and BLAS starts no threads of its own.
if [ "$gpus" -eq 0 ]; then export OMPI_MCA_mpi_yield_when_idle=1; fi
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
