#!/usr/bin/env bash
# What a process of pytest-xdist is started by, in new namespaces: it has a loopback interface and
# a /dev/shm of its own. This shell stays, as the first process has to reap.
ip link set lo up
mount -t tmpfs kvlane /dev/shm
"$@"
exit $?
