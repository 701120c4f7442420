#!/bin/bash
# tiny: 16 ranks, 2 nodes. Written by `mimo launch`.
# placement.txt beside this file says which rank is where.
#SBATCH --job-name=tiny
#SBATCH --output="/project/runs/tiny/launch/job_%j.out"
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=USR1@300
#SBATCH --requeue

set -o pipefail # not -u: bash before 4.4 takes an empty array for an unset one
: "${SLURM_JOB_ID:?is not set: give this script to sbatch}"

# ------------------------------------------------------------------------------ folders
cd /project || exit 1 # relative paths of the recipe begin here
run=/project/runs/tiny
launch="$run/launch"
logs="$launch"
recipe="$launch/recipe.yaml"
chain="$1" # the file that lists the jobs of a chain, if this is one of them
mkdir -p "$launch" "$logs" || exit 1

# `mimo status` knows jobs from this list. Who submits one by hand does not add it.
number="${2:-$SLURM_JOB_ID}" # of a task of an array: the array's and its own
kind="by hand"
if [ -n "$1" ]; then kind=chain; elif [ -n "$2" ]; then kind=array; fi
if ! grep -qsF "\"job_id\": \"$number\"" "$launch/jobs.jsonl"; then
  printf '{"time": "%s", "job_id": "%s", "kind": "%s", "script": %s}\n' \
    "$(date +%FT%T%z)" "$number" "$kind" '"/project/runs/tiny/launch/job.sh"' >>"$launch/jobs.jsonl"
fi

# -------------------------------------------------------------------------- environment
# SLURM hands on what the submitting shell had set; it may have been in another job.
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
unset MIMO_RENDEZVOUS "${!TORCHELASTIC_@}"
export PATH=/project/.venv/bin:"$PATH"
export HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1


# A command of mimo, once, on this node.
here() {
  mimo "$@"
}

# ---------------------------------------------------------------- what an exit code means
later_jobs() { # of this chain
  if [ -n "$chain" ]; then sed -n "/^$SLURM_JOB_ID\$/,\$p" "$chain" | tail -n +2; fi
}

finish() {
  local jobs failures
  echo "exit code $1 at $(date)"
  case $1 in
    0 | 2) # done; or a mistake in the input, which another start would meet again
      mapfile -t jobs < <(later_jobs)
      if [ "${#jobs[@]}" -gt 0 ]; then scancel "${jobs[@]}"; fi
      ;;
    75 | 138 | 143) # saved, or asked to end (SIGUSR1, SIGTERM) before it could say so;
      # to be continued: by the next job of the chain, or by this one
      if [ -z "$chain" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
      ;;
    *)
      echo "$SLURM_JOB_ID exit code $1 at $(date)" >>"$launch/failures"
      failures=$(grep -c "^$SLURM_JOB_ID " "$launch/failures")
      if [ "$failures" -le 3 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
      ;;
  esac
  exit "$1"
}

# ------------------------------------------------------------------------ ranks and nodes
# A command of mimo as every rank; the others get the time to leave with an exit code, too.
rank=()
ranks() {
  srun --export=ALL --kill-on-bad-exit=0 --wait=120 \
    --nodes=2 --ntasks=16 --ntasks-per-node=8 --distribution=block \
    --gpu-bind=none \
    "${rank[@]}" mimo "$@"
}

# ------------------------------------------------------------------------------ the job
here check "$recipe" || finish $?

# Ranks meet on this node, the first, which runs rank 0.
meeting=$(here rendezvous) || finish $?
MIMO_JOB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MIMO_JOB_SECRET MASTER_ADDR="${meeting% *}" MASTER_PORT="${meeting#* }"
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

ranks preflight "$recipe" || finish $?

# Not srun's --output: it miscounts the ranks of heterogeneous jobs.
rank=(bash -c 'exec "$@" >>"$logs/rank_$SLURM_PROCID.log" 2>&1' rank)
MIMO_BEGAN=$(date +%s.%N)
export logs MIMO_BEGAN
ranks train "$recipe" --resume
code=$?
case $code in
  0 | 75) ;;
  *) here logs "$run" --first-error ;;
esac
finish $code
