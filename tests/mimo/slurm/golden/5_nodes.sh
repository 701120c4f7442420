#!/bin/bash -l
# tiny: 40 ranks, 5 nodes. Written by `mimo launch`.
# placement.txt beside this file has the node of each rank.
#SBATCH --job-name=tiny
#SBATCH --output="/scratch/mimo logs/tiny/job_%j.out"
#SBATCH --open-mode=append
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --partition=gpu
#SBATCH --account=vision-lab
#SBATCH --qos=normal
#SBATCH --constraint=a100&ib
#SBATCH --time=2-00:00:00
#SBATCH --exclusive
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --mem=900G
#SBATCH --mail-type=FAIL
#SBATCH --exclude=gpu[003,017]

set -o pipefail # not -u: bash before 4.4 takes an empty array for an unset one
: "${SLURM_JOB_ID:?is not set: give this script to sbatch}"

# ------------------------------------------------------------------------------ folders
cd /project || exit 1 # relative paths of the recipe begin here
run=/project/runs/tiny
launch="$run/launch"
logs='/scratch/mimo logs/tiny'
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
module load cuda/12.8 || exit 1
module load 'nccl tests/2.27' || exit 1
export PATH=/shared/venv/bin:"$PATH"
export HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=12
export NCCL_SOCKET_IFNAME=ib0
export GREETING='it'"'"'s $(hostname) `date` "#"'


# Run a command of mimo once, on this node.
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
      if [ "$failures" -le 5 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
      ;;
  esac
  exit "$1"
}

# ------------------------------------------------------------------------ ranks and nodes
# Run a command of mimo as every rank. When one fails, the others get time for their exit codes.
rank=()
ranks() {
  srun --export=ALL --kill-on-bad-exit=0 --wait=120 \
    --nodes=5 --ntasks=40 --ntasks-per-node=8 --distribution=block \
    --cpus-per-task=12 \
    --gpu-bind=none \
    "${rank[@]}" mimo "$@"
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
