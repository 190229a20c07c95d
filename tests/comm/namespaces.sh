#!/bin/bash
# namespaces.sh MTPRUN ADD_UP_PROGRAM
#
# Protects: two machines that share nothing but a network, here two network namespaces with a cable between them: the
# launchers meet, every rank gets its number, and the collectives go over the address that reaches the master.
set -uo pipefail
mtprun=$(realpath "${1:?usage: namespaces.sh MTPRUN PROGRAM}")
program=$(realpath "${2:?usage: namespaces.sh MTPRUN PROGRAM}")
skip()
{
    echo "skipped: $1"
    exit 77
}

if [ -z "${MTP_IN_NAMESPACE:-}" ]; then
    command -v ip >/dev/null || skip "no ip command (Debian package iproute2)"
    flags=(-nm)
    [ "$(id -u)" -eq 0 ] || flags=(-Urnm)
    reason=$(unshare "${flags[@]}" true 2>&1) || skip "network namespaces are forbidden here: $reason"
    # of its own process group and namespace: whatever is left ends with it
    MTP_IN_NAMESPACE=1 exec unshare "${flags[@]}" --pid --fork --mount-proc --kill-child "$0" "$mtprun" "$program"
fi

cable()
{
    mount -t tmpfs none /run && mkdir -p /run/netns || return 1
    ip netns add host0 && ip netns add host1 || return 1
    ip link add cable0 netns host0 type veth peer name cable1 netns host1 || return 1
    local host
    for host in 0 1; do
        ip -n host$host addr add 10.77.0.$((host + 1))/24 dev cable$host || return 1
        ip -n host$host link set cable$host up && ip -n host$host link set lo up || return 1
    done
}
reason=$(cable 2>&1) || skip "no two namespaces with a cable: $reason"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export MTP_RDZV_SECRET="a secret of the test"
ranks=(1 2)
for host in 0 1; do
    ip netns exec host$host "$mtprun" --nnodes 2 --node-rank $host --nproc-per-node ${ranks[host]} --join-seconds 30 \
        --rdzv-endpoint 10.77.0.1:4000 "$program" add_up >"$work/$host" 2>&1 &
    pids[host]=$!
done
bad=0
for host in 0 1; do
    wait "${pids[host]}" || { echo "host $host ended with status $?"; bad=1; }
    found=$(grep -c '^\[[0-2]\] sum 6$' "$work/$host")
    [ "$found" -eq "${ranks[host]}" ] || { echo "host $host: $found of ${ranks[host]} sums"; bad=1; }
    [ "$bad" -eq 0 ] || cat "$work/$host"
done
exit $bad
