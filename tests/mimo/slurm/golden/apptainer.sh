#!/bin/bash
# tiny: 17 ranks, 3 nodes. Written by `mimo launch`.
# placement.txt beside this file has the node of each rank.
#SBATCH --job-name=tiny
#SBATCH --output="/project/runs/tiny/launch/job_%j.out"
#SBATCH --open-mode=append
#SBATCH --nodes=3
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

# `mimo status` reads the jobs from this list; a job submitted by hand adds itself.
number="${2:-$SLURM_JOB_ID}" # of a task of an array: the array's and its own
kind="by hand"
if [ -n "$1" ]; then kind=chain; elif [ -n "$2" ]; then kind=array; fi
if ! grep -qsF "\"job_id\": \"$number\"" "$launch/jobs.jsonl"; then
  printf '{"time": "%s", "job_id": "%s", "kind": "%s", "script": %s}\n' \
    "$(date +%FT%T%z)" "$number" "$kind" '"/project/runs/tiny/launch/job.sh"' >>"$launch/jobs.jsonl"
fi

# -------------------------------------------------------------------------- environment
# The submitting shell may itself be in a job, and SLURM passes its environment on.
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
unset MIMO_RENDEZVOUS "${!TORCHELASTIC_@}"
export HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1

container=( # that all commands of mimo run in
  apptainer
  exec
  --pwd=/project
  --nv
  --bind=/data:/data
  --bind=/project:/project
  --bind=/datasets:/datasets:ro
  '/images/mimo 1.2.sif'
)

# Run a command of mimo once, on this node.
here() {
  "${container[@]}" mimo "$@"
}

# ---------------------------------------------------------------- what an exit code means
later_jobs() { # of this chain
  if [ -n "$chain" ]; then sed -n "/^$SLURM_JOB_ID\$/,\$p" "$chain" | tail -n +2; fi
}

finish() {
  local jobs failures
  echo "exit code $1 at $(date)"
  case $1 in
    0 | 2) # done, or a mistake in the input, with which another start would fail as well
      mapfile -t jobs < <(later_jobs)
      if [ "${#jobs[@]}" -gt 0 ]; then scancel "${jobs[@]}"; fi
      ;;
    75 | 138 | 143) # saved, or stopped by SIGUSR1 or SIGTERM before it had begun;
      # the next job of the chain continues, or this one after its requeue
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
unset SLURM_NTASKS_PER_NODE # the tables below have the node of each rank

# Print the node of each rank, one per line. $1: nodes; others: RANKSxNODE in the order of ranks.
hosts() {
  local nodes entry i
  mapfile -t nodes < <(scontrol show hostnames "$1")
  for entry in "${@:2}"; do
    for ((i = 0; i < ${entry%x*}; i++)); do echo "${nodes[${entry#*x}]}"; done
  done
}

ranks_of_all=(1x0 8x1 8x2)
hosts "$SLURM_JOB_NODELIST" "${ranks_of_all[@]}" >"$launch/hosts_all"

# Run a command of mimo as every rank. When one fails, the others get time for their exit codes.
rank=()
ranks() {
  srun --export=ALL --kill-on-bad-exit=0 --wait=120 \
    --nodes=3 --ntasks=17 \
    --distribution=arbitrary --nodelist="$launch/hosts_all" \
    --gpu-bind=none \
    "${container[@]}" "${rank[@]}" mimo "$@"
}

# ------------------------------------------------------------------------------ the job
here check "$recipe" || finish $?

# Ranks meet on this node, the first, which runs rank 0. A port that answers is another program's.
MASTER_ADDR=$(uname -n) MASTER_PORT=$((20000 + SLURM_JOB_ID * 37 % 10000))
while (: >"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do
  MASTER_PORT=$((MASTER_PORT + 1))
done
export MASTER_ADDR MASTER_PORT
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

ranks preflight "$recipe" || finish $?

# Not srun's --output: it miscounts the ranks of heterogeneous jobs.
rank=(bash -c 'exec "$@" >>"$logs/rank_$SLURM_PROCID.log" 2>&1' rank)
export logs
ranks train "$recipe" --resume
code=$?
case $code in
  0 | 75) ;;
  *) here logs "$run" --first-error ;;
esac
finish $code
