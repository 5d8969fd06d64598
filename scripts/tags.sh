#!/usr/bin/env bash
# tags.sh: prints the build tags of this machine: cuda where there is a C
# compiler, rdma where that finds the verbs headers too, both on the machines
# that have such devices. A line on stderr says what is left out, and why. The
# binary finds the drivers themselves at run time. With cuda, a build takes the
# environment of scripts/cuda-env.sh.
set -euo pipefail
case $(uname -m) in
x86_64 | aarch64) ;;
*)
	echo "tags: cuda and rdma are left out: they are for x86_64 and aarch64, this is $(uname -m)" >&2
	exit
	;;
esac
if ! echo '#include <dlfcn.h>' | ${CC:-cc} -E -x c - >/dev/null 2>&1; then
	echo "tags: cuda and rdma are left out: this machine has no C compiler with headers (Debian: apt-get install gcc libc6-dev)" >&2
elif echo '#include <infiniband/verbs.h>' | ${CC:-cc} -E -x c - >/dev/null 2>&1; then
	echo cuda,rdma
else
	echo "tags: rdma is left out: this machine has no infiniband/verbs.h (Debian: apt-get install libibverbs-dev)" >&2
	echo cuda
fi
