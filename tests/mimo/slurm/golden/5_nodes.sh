#!/bin/bash -l
# tiny: 40 ranks, 5 nodes. Written by `mimo launch`.
# placement.txt beside this file says which rank is where.
#SBATCH --job-name=tiny
#SBATCH --output="/scratch/mimo logs/tiny/job_%j.out"
#SBATCH --open-mode=append
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=900G
#SBATCH --partition=gpu
#SBATCH --account=vision-lab
#SBATCH --qos=normal
#SBATCH --constraint=a100&ib
#SBATCH --reservation=spring_2026
#SBATCH --time=2-00:00:00
#SBATCH --exclusive
#SBATCH --signal=USR1@600
#SBATCH --requeue
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
module load cuda/12.8 || exit 1
module load 'nccl tests/2.27' || exit 1
export PATH=/shared/venv/bin:"$PATH"
export HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=12
export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
export MIMO_LOCAL_LOGS=/tmp/mimo
export NCCL_DEBUG=WARN
export GREETING='it'"'"'s $(hostname) `date` "#"'


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
      if [ "$failures" -le 5 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
      ;;
  esac
  exit "$1"
}

# ------------------------------------------------------------------------ ranks and nodes
# A command of mimo as every rank; the others get the time to leave with an exit code, too.
rank=()
ranks() {
  srun --export=ALL --kill-on-bad-exit=0 --wait=120 \
    --nodes=5 --ntasks=40 --ntasks-per-node=8 --distribution=block \
    --cpus-per-task=12 \
    --gpu-bind=closest \
    "${rank[@]}" mimo "$@"
}

# ------------------------------------------------------------------------------ the job
here check "$recipe" || finish $?

# Ranks meet on this node, the first, which runs rank 0.
meeting=$(here rendezvous --interface ib0) || finish $?
MIMO_JOB_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MIMO_JOB_SECRET MASTER_ADDR="${meeting% *}" MASTER_PORT="${meeting#* }"
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

ranks preflight "$recipe" || finish $?

# Not srun's --output: it miscounts the ranks of heterogeneous jobs.
# What a rank prints goes to its node, and from there to the run every ten seconds and at its end.
rank=(bash -c '
  asked=""
  trap asked=1 TERM USR1 # SLURM sends them to the rank as well, which ends as it likes
  log="$logs/rank_$SLURM_PROCID.log" own="$MIMO_LOCAL_LOGS/mimo-$UID-$SLURM_JOB_ID"
  mkdir -p "$MIMO_LOCAL_LOGS" || exit 1
  (umask 077 && mkdir -p "$own") || exit 1
  if [ -L "$own" ] || [ ! -O "$own" ]; then
    echo "cluster.local_logs: $own is not a folder of this user; give another place" >&2
    exit 2
  fi
  own="$own/rank_$SLURM_PROCID"
  touch "$log" "$own.log" "$own.taken"

  take() { # what is new; an earlier start here may have been killed before it took all
    local from to
    from=$(<"$own.taken") to=$(wc -c <"$own.log")
    ((to > from)) || return 0
    tail -c "+$((from + 1))" "$own.log" | head -c "$((to - from))" >>"$log" || return
    echo "$to" >"$own.taken"
  }

  coproc taker { trap "" TERM USR1; while read -rt 10; [ $? -gt 128 ]; do take; done; }
  if [ -n "$asked" ]; then exit 143; fi # before there was a rank
  "$@" >>"$own.log" 2>&1
  code=$?
  trap "" TERM USR1
  eval "exec ${taker[1]}>&-" # which ends the taker
  wait
  take && rm "$own.log" "$own.taken"
  exit "$code"
' rank)
MIMO_BEGAN=$(date +%s.%N)
export logs MIMO_BEGAN
ranks train "$recipe" --resume
code=$?
case $code in
  0 | 75) ;;
  *) here logs "$run" --first-error ;;
esac
finish $code
