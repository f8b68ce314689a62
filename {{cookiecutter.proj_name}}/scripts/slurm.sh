#!/bin/sh
# Train on a cluster:  sh scripts/slurm.sh [--slurm.OPTION VALUE ...] [--dry-run] --config FILE [--key value ...]
#
#   --slurm.nodes N             number of nodes
#   --slurm.gpus N              GPUs per node, one process each; 0: CPU; default: as many as the config's gpu_ids
#   --slurm.tasks N             processes per node when training on CPUs
#   --slurm.cpus N              cores per process; with --num_workers 4, ask for 5
#   --slurm.mem SIZE            memory per node, such as 32G
#   --slurm.time TIME           time limit, such as 2:00:00 or 1-12
#   --slurm.partition NAME      --slurm.account NAME      --slurm.qos NAME
#   --slurm.array TASKS         one run per number, as in 0-4%2; %a in any config value stands for the number
#   --slurm.names FILE          JSON with the name of each run of the array, {"0": "small", ...}; default: task_<number>
#   --slurm.signal_seconds N    seconds before the time limit at which the run saves and the job is requeued
#   --dry-run                   print the job file only
#
# The config is checked and frozen, and the code copied, before the job is queued, so you can edit both afterwards.
# Inside an allocation (salloc), training starts at once. PYTHON sets the interpreter. See docs/tools/slurm.md.
set -eu

# Your cluster: the defaults of the options above. An environment variable (TRAIN_PARTITION=gpu) overrides a default,
# and an option overrides both. Empty: Slurm's own default.
nodes=${TRAIN_NODES:-1}
gpus=${TRAIN_GPUS:-}
tasks=${TRAIN_TASKS:-1}
cpus=${TRAIN_CPUS:-1}
mem=${TRAIN_MEM:-}
time=${TRAIN_TIME:-2:00:00}
partition=${TRAIN_PARTITION:-}
account=${TRAIN_ACCOUNT:-}
qos=${TRAIN_QOS:-}
array=${TRAIN_ARRAY:-}
signal_seconds=${TRAIN_SIGNAL_SECONDS:-120}

# Your cluster: more #SBATCH lines, such as "#SBATCH --constraint=a100".
more_directives() {
    cat <<'END'
END
}

# Your cluster: commands that run before Python, such as "module load cuda" or ". ~/env/bin/activate".
preparations() {
    cat <<'END'
END
}

fail() {
    echo "slurm.sh: $*" >&2
    exit 2
}

set_option() {
    case $2 in
    *'
'*) fail "$1: the value has a line break" ;;
    esac
    case $1 in
    --slurm.nodes | --slurm.gpus | --slurm.tasks | --slurm.cpus | --slurm.signal_seconds)
        case $2 in
        '' | *[!0-9]*) fail "$1 $2: must be an integer" ;;
        esac
        ;;
    esac
    case $1 in
    --slurm.nodes) nodes=$2 ;;
    --slurm.gpus) gpus=$2 ;;
    --slurm.tasks) tasks=$2 tasks_given=yes ;;
    --slurm.cpus) cpus=$2 ;;
    --slurm.mem) mem=$2 ;;
    --slurm.time) time=$2 ;;
    --slurm.partition) partition=$2 ;;
    --slurm.account) account=$2 ;;
    --slurm.qos) qos=$2 ;;
    --slurm.array) array=$2 ;;
    --slurm.names) names=$2 ;;
    --slurm.signal_seconds) signal_seconds=$2 ;;
    *) fail "$1: there is no such option; sh scripts/slurm.sh --help lists them" ;;
    esac
}

dry_run='' tasks_given='' look='' names=''
left=$#
while [ "$left" -gt 0 ]; do
    word=$1
    shift
    left=$((left - 1))
    case $word in
    -h | --help)
        sed -n '/^# Train/,/^set/ { /^#/ { s/^# \{0,1\}//; p; }; }' "$0"
        exit
        ;;
    --slurm.*=*) set_option "${word%%=*}" "${word#*=}" ;;
    --slurm.*)
        [ "$left" -gt 0 ] || fail "$word: needs a value"
        set_option "$word" "$1"
        shift
        left=$((left - 1))
        ;;
    --dry-run) dry_run=yes ;;
    *)
        case $word in
        --print-config | --list | --list=*) look=yes ;;
        esac
        set -- "$@" "$word"
        ;;
    esac
done

cd -- "$(dirname -- "$0")/.."
python=$(command -v "${PYTHON:-python}") || fail "there is no ${PYTHON:-python} on the PATH; set PYTHON=/path/to/python"
case $python in
/*) ;;
*) python=$PWD/$python ;;
esac
[ -z "$look" ] || exec "$python" -m tools.slurm -- "$@"

inside=${SLURM_JOB_ID:-}
if [ -n "$inside" ]; then
    [ -z "$array" ] || fail "--slurm.array $array: job $inside is one allocation; submit an array from outside of it"
elif [ -z "$dry_run" ] && ! command -v sbatch >/dev/null; then
    fail "there is no sbatch on the PATH, so Slurm is not available; train here with scripts/gpu.sh or" \
        "scripts/cpu.sh, or print the job file with --dry-run"
fi

prepared=$("$python" -m tools.slurm ${dry_run:+--dry-run} ${gpus:+--gpus "$gpus"} ${array:+--array "$array"} \
    ${names:+--names "$names"} -- "$@")
prepared=$(printf '%s\n' "$prepared" | tail -n 3)  # after what modules print while they are imported
{
    IFS= read -r run
    IFS= read -r job
    IFS= read -r gpus
} <<END
$prepared
END
case $gpus in
'' | *[!0-9]*) fail "tools.slurm must print the folders of the run and the job and the number of GPUs last, not: $prepared" ;;
esac
# If this script ends before the job is queued, for any reason, the job's folder is removed.
[ -n "$dry_run" ] || trap 'rm -rf -- "$job"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
if [ "$gpus" -gt 0 ]; then
    [ -z "$tasks_given" ] || [ "$tasks" = "$gpus" ] ||
        fail "--slurm.tasks $tasks: there is one process for each of the $gpus GPUs"
    tasks=$gpus
fi
if [ -n "$array" ]; then
    log=%A_%a.out
    task=_\$SLURM_ARRAY_TASK_ID
else
    log=%j.out
    task=''
fi

# For #SBATCH lines, which allow double quotes.
slurm_quoted() {
    printf '"%s"' "$(printf '%s' "$1" | sed 's/["\\]/\\&/g')"
}

shell_quoted() {
    printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")"
}

# The run's folder; a task of an array reads it from a file with its number.
run_path() {
    if [ -n "$array" ]; then
        echo "\$(cat -- \"\$job/run$task\")"
    else
        shell_quoted "$run"
    fi
}

directives() {
    cat <<END
#SBATCH --job-name=$(slurm_quoted "${run##*/}")
#SBATCH --chdir=$(slurm_quoted "$job")
#SBATCH --output=$log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@$signal_seconds
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$tasks
#SBATCH --cpus-per-task=$cpus
END
    [ "$gpus" = 0 ] || echo "#SBATCH --gpus-per-node=$gpus"
    for pair in "array=$array" "mem=$mem" "time=$time" "partition=$partition" "account=$account" "qos=$qos"; do
        [ -z "${pair#*=}" ] || echo "#SBATCH --${pair%%=*}=$(slurm_quoted "${pair#*=}")"
    done
    more_directives
}

places() {
    preparations
    cat <<END
project=$(shell_quoted "$PWD")
job=$(shell_quoted "$job")
run=$(run_path)
python=$(shell_quoted "$python")
cd -- "\$project" || exit 1
export OMP_NUM_THREADS=$cpus PYTHONUNBUFFERED=1
END
}

# One task per process; the processes read their ranks from Slurm's variables.
launch() {
    cat <<END
srun --nodes=$nodes --ntasks-per-node=$tasks --cpus-per-task=$cpus$([ "$gpus" = 0 ] || echo " --gpus-per-node=$gpus") \\
    --kill-on-bad-exit=1 --unbuffered "\$python" "\$job/code/train.py" --config "\$job/config$task.yaml"
END
}

job_file() {
    echo '#!/bin/sh'
    directives
    places
    cat <<END
trap : USR1 USR2 # these signals are for training; this shell must survive them
requeue() {
    (cd -- "\$job/code" && exec "\$python" -m tools.slurm.requeue "\$@" "\$run" "\$job/starts$task.jsonl")
}
state=\$(requeue before) || exit
[ "\$state" != finished ] || exit 0
$(launch)
requeue after \$?
END
}

if [ -n "$dry_run" ]; then
    job_file
    exit
fi
file=$job/job.sh
if [ -n "$inside" ]; then
    { places && launch; } >"$file"
    trap - EXIT
    exec sh "$file"
fi
job_file >"$file"
id=$(sbatch --parsable "$file") || fail "nothing was queued; see the message of sbatch above"
trap - EXIT
id=${id%%;*}
cat <<END
job $id is queued: ${array:+tasks $array, each }$nodes node(s) x $tasks process(es)
  run folder  $run
  log         $job/$(echo "$log" | sed "s/%[Aj]/$id/; s/%a/*/")
  watch       squeue -j $id
  cancel      scancel $id
END
