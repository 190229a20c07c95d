#!/bin/bash
# torchrun.sh VENV BUILD_DIR
#
# Protects: torchrun and mtprun start each other's programs. Under the real torchrun, which has no store of ours, ranks
# find each other beside MASTER_PORT: on one machine, after a restart, and as two machines with MTP_RDZV_SECRET. Under
# mtprun a PyTorch script finds its own process group.
set -uo pipefail
venv=${1:?usage: torchrun.sh VENV BUILD_DIR}
build=$(realpath "${2:?usage: torchrun.sh VENV BUILD_DIR}")
program=$build/tests/test_cli_mtprun
export PATH=$venv/bin:$PATH OMP_NUM_THREADS=1
unset MTP_RDZV_SECRET MTP_RDZV_ENDPOINT MTP_RDZV_PORT
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0

# expect NAME COUNT TEXT COMMAND...: the command ends well and TEXT stands COUNT times in what it prints
expect()
{
    local name=$1 count=$2 text=$3 found
    shift 3
    if timeout 120 "$@" >"$work/out" 2>&1 && found=$(grep -c "$text" "$work/out") && [ "$found" -eq "$count" ]; then
        echo "ok: $name"
    else
        echo "FAILED: $name:"
        cat "$work/out"
        bad=1
    fi
}

two_machines()
{
    export MTP_RDZV_SECRET="a secret of the test"
    local port node pids=() status=0
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    for node in 0 1; do
        torchrun --nnodes 2 --node-rank $node --nproc-per-node $((node + 1)) --master-addr 127.0.0.1 \
            --master-port "$port" --no-python "$program" add_up &
        pids+=($!)
    done
    for node in 0 1; do wait "${pids[node]}" || status=1; done
    return $status
}
export -f two_machines
export program

expect "torchrun, three ranks" 3 '^sum 6$' torchrun --standalone --nproc-per-node 3 --no-python "$program" add_up
# who fails first has the other ended, which is to have printed its sum by then
# shellcheck disable=SC2016
expect "torchrun, a restart" 4 '^sum 3$' torchrun --standalone --nproc-per-node 2 --max-restarts 1 --no-python \
    sh -c '"$0" add_up && { [ $TORCHELASTIC_RESTART_COUNT = 1 ] || { sleep 2; false; }; }' "$program"
expect "torchrun, two machines" 3 '^sum 6$' bash -c two_machines

cat >"$work/reduce.py" <<'END'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print("torch sum", x.item())
dist.destroy_process_group()
END
expect "mtprun, a PyTorch script" 2 '^\[[01]\] torch sum 3.0$' \
    "$build/mtprun" --standalone --nproc_per_node=2 "$work/reduce.py"
exit $bad
