#!/bin/sh
# The first process of a guest (guest.py). The root is the host's, read-only; changes go to an
# overlay in the guest's memory. /dev/shm is the directory that the lab has prepared.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/upper /run/work /run/root
root=/run/root
mount -t overlay overlay -o lowerdir=/,upperdir=/run/upper,workdir=/run/work $root ||
  echo "guest: no overlay"

# Network devices and their RDMA devices; the environment of the agents.
. /dev/shm/guest/setup

mount -t proc proc $root/proc
mount -t sysfs sysfs $root/sys
mount -t devtmpfs devtmpfs $root/dev
mkdir -p $root/dev/shm $root/dev/pts
mount -t tmpfs tmpfs $root/dev/shm
mount -t devpts devpts $root/dev/pts
mount -t tmpfs -o mode=755 tmpfs $root/run
# User Mode Linux does not say "cpu MHz", which perftest looks for.
cp /dev/shm/guest/cpuinfo $root/run/cpuinfo
mount --bind $root/run/cpuinfo $root/proc/cpuinfo
# There is no name server to wait for.
rm -f $root/etc/resolv.conf
: >$root/etc/resolv.conf

if [ -n "$preload" ]; then
  # shellcheck disable=SC2086
  chroot $root "$python" "$agent" serve "$warm_port" $preload &
fi
exec chroot $root "$python" -I -S "$agent" serve "$port"
