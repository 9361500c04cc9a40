#!/bin/sh
# What mpiexec calls in place of ssh, as `enter.sh -x HOST COMMAND…`: runs the command line on that host of the cluster.
# RMA_MM_HOSTS: for each host its address, "=" and the id of a process that lives there.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
for entry in $RMA_MM_HOSTS; do
    if [ "${entry%%=*}" = "$host" ]; then
        exec nsenter --target "${entry#*=}" --net --uts --ipc --mount -- sh -c "$*"
    fi
done
echo "enter.sh: there is no host $host among: $RMA_MM_HOSTS" >&2
exit 255
