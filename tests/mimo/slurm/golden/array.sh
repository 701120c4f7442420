#!/bin/bash
# 2 runs, each a task of one array job. Written by `mimo launch`.
#SBATCH --job-name=first-array
#SBATCH --array=0-1
#SBATCH --output="/scratch/mimo logs/first/array_%A_%a.out"
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
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

runs=(
  /project/runs/first
  /project/runs/second
)
logs=(
  '/scratch/mimo logs/first'
  '/scratch/mimo logs/second'
)
exec >>"${logs[SLURM_ARRAY_TASK_ID]}/job_$SLURM_JOB_ID.out" 2>&1
number="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
exec bash -l "${runs[SLURM_ARRAY_TASK_ID]}/launch/job.sh" "" "$number"
