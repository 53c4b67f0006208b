#!/usr/bin/env bash
@@SBATCH@@

# Copy this file, change it, and name your copy with `cluster.slurm.template`. `megatron-rl slurm` replaces the words
# between double at-signs. Several values are lists of shell words, already quoted.
set -euo pipefail

export run_dir=@@RUN_DIR@@
config=@@CONFIG@@
python=(@@PYTHON@@) # Python of the job, with the container's command before it
srun_options=(@@SRUN_OPTIONS@@)
cd @@WORK_DIR@@
@@SETUP@@

export job_dir="$run_dir/slurm/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
export MEGATRON_RL_JOB_DIR="$job_dir"
export batch_node=$SLURMD_NODENAME
export SLURM_EXPORT_ENV=ALL # steps receive what this script exports, and not only the names of --export
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$job_dir/token"
mkdir -p "$job_dir"

say() { echo "$(date '+%F %T') job $SLURM_JOB_ID: $*"; }

# The begin of a phase, for the seconds from submission to the first step.
phase() { echo "$(date +%s.%N) $*" >> "$job_dir/phases"; }

submitted=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%V 2>/dev/null || true)
if [ -n "$submitted" ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
  echo "$(date -d "$submitted" +%s) submission" >> "$job_dir/phases"
fi

# A task that ends leaves the others of its step alone, whatever KillOnBadExit and WaitTime of the cluster's slurm.conf say:
# an unhealthy node, or one whose Ray has ended, must not take the healthy ones with it.
alone=(--kill-on-bad-exit=0 --wait=0)

# Seconds of a step in which a node may hang: behind a wedged driver or file system a process does not even end by SIGKILL.
# Nodes may unpack an image first. After the checks the job goes on with the nodes that have answered. A sum without a result
# ends this start, and the job is requeued.
check_limit_s=900
reduce_limit_s=1500
within() { timeout --kill-after=30 "$@"; }

# Sets `step` to the command that runs a part of the job once on each of the named nodes.
prepare() {
  local nodes=$1 count=$2 part=$3
  shift 3
  step=(srun --overlap "${alone[@]}" --cpu-bind=none --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$nodes"
    "$@" "${srun_options[@]}" "${python[@]}" -m launcher.commands.slurm_job "$part" "$config")
}

# pyxis keeps a container that has a name, unless the cluster sets its option `container_scope=job`.
remove_containers() {
  [[ "${srun_options[*]}" == *--container-name=* ]] || return 0
  timeout 60 srun --overlap --no-kill --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    enroot remove --force "pyxis_megatron-rl-$SLURM_JOB_ID" > /dev/null 2>&1 || true
}

# Runs on the other nodes. SLURM keeps a job of several nodes when one of them dies (--no-kill). If that is the node of this
# script, nobody would end the job: another node requeues it, once SLURM has taken the silent node out of the job.
# SLURM ends the watch with the job. A run that is over is watched too: without its network this script cannot end the job.
# shellcheck disable=SC2317  # called by srun
watch_batch_node() {
  local seen="" now silent_s=0 nodes
  while true; do
    sleep 10
    now=$(cat "$job_dir/alive" 2>/dev/null)
    silent_s=$((silent_s + 10))
    [ "$now" = "$seen" ] || silent_s=0
    seen=$now
    [ "$silent_s" -ge 60 ] || continue
    silent_s=0 # SLURM is asked once a minute
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)
    if [ -n "$nodes" ] && ! scontrol show hostnames "$nodes" | grep --quiet --line-regexp --fixed-strings "$batch_node"; then
      say "the node of the batch script, $batch_node, is lost: requeued" >> "$run_dir/logs/slurm-$SLURM_JOB_ID.out"
      scontrol requeue "$SLURM_JOB_ID"
    fi
  done
}
export -f say watch_batch_node

# Requeues the job or not, and ends it with the exit code of the run.
finish() {
  local code
  code=$(cat "$job_dir/code" 2>/dev/null || echo 1)
  prepare "$batch_node" 1 decide
  "${step[@]}" || say "could not decide on a requeue"
  if [ -e "$job_dir/requeue" ]; then
    scontrol requeue "$SLURM_JOB_ID" # the same container serves the next start
  else
    remove_containers
  fi
  exit "$code"
}

# A signal must not reach Ray: the controller looks for this file, saves a checkpoint and ends the run. Before the nodes are
# chosen the run of another job may have the directory, and the file would stop that run.
asked=""
# shellcheck disable=SC2317  # called by a trap
request_stop() {
  asked=yes
  [ -e "$job_dir/nodes" ] || return 0
  say "asks the run to stop"
  printf '{"reason": "%s", "requeue": true, "time_s": %s}\n' "SLURM's signal (time limit or preemption)" "$(date +%s)" \
    > "$run_dir/stop.json.partial"
  mv "$run_dir/stop.json.partial" "$run_dir/stop.json"
}
trap request_stop USR1
trap 'say "was terminated"; touch "$job_dir/over"' TERM
trap 'touch "$job_dir/over"' EXIT # also where a check refuses the nodes: the parts in the background end

phase "node checks"
say "checks $SLURM_JOB_NUM_NODES node(s): $SLURM_JOB_NODELIST"
(umask 077 && head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")
scontrol show hostnames "$SLURM_JOB_NODELIST" > "$job_dir/allocated"
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  (
    trap - USR1 TERM
    while [ ! -e "$job_dir/over" ]; do
      date +%s.%N > "$job_dir/alive"
      sleep 10
    done
  ) &
  (
    trap - USR1 TERM
    others=$(grep --line-regexp --fixed-strings --invert-match "$batch_node" "$job_dir/allocated" | paste -sd,)
    while [ ! -e "$job_dir/over" ]; do
      srun --overlap --no-kill "${alone[@]}" --cpu-bind=none --nodes=$((SLURM_JOB_NUM_NODES - 1)) \
        --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 \
        --nodelist="$others" bash -c watch_batch_node || [ -e "$job_dir/over" ] || sleep 10
    done
  ) > /dev/null 2>&1 &
fi
prepare "$SLURM_JOB_NODELIST" "$SLURM_JOB_NUM_NODES" check
tries=0
until within "$check_limit_s" "${step[@]}" || compgen -G "$job_dir/checks/*.json" > /dev/null; do # a check that fails has written its record
  tries=$((tries + 1))
  [ "$tries" -lt 6 ] || break
  say "SLURM cannot start a step on these nodes (a node may have just come back); tries again in 10 s"
  sleep 10
done
prepare "$batch_node" 1 choose # exit code 2 if the run of another job has the run directory
"${step[@]}"
[ -z "$asked" ] || request_stop
nodes=$(paste -sd, "$job_dir/nodes")
num_nodes=$(wc -l < "$job_dir/nodes")

if [ "$num_nodes" -gt 1 ]; then
  phase "all-reduce"
  say "sums a number over $nodes"
  prepare "$nodes" "$num_nodes" reduce
  within "$reduce_limit_s" "${step[@]}" || {
    code=$?
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
      say "the sum has no result after $reduce_limit_s s; ends it"
      code=5 # a deadline passed
    fi
    if [ -n "$(sinfo --noheader --nodes="$nodes" --states=down --format=%N)" ]; then
      code=9 # a node has died since the checks
    fi
    echo "$code" > "$job_dir/code"
    finish
  }
fi

phase "Ray on the nodes"
say "starts Ray on $nodes"
prepare "$nodes" "$num_nodes" node --no-kill # the other nodes go on after the death of one
(
  trap - USR1 TERM
  "${step[@]}" || true
  [ -e "$job_dir/over" ] || touch "$job_dir/node_lost"
) &
ray=$!
prepare "${nodes%%,*}" 1 drive
"${step[@]}" &
driver=$!

# A signal ends `wait`; the loop goes on until the run has ended.
while kill -0 "$driver" 2>/dev/null; do
  wait "$driver" || true
done
touch "$job_dir/over"
# Nodes end Ray within seconds. For a node that has died, srun would wait until SLURM has noticed its death.
waited_s=0
while kill -0 "$ray" 2>/dev/null && [ "$waited_s" -lt 60 ]; do
  sleep 1
  waited_s=$((waited_s + 1))
done

finish
