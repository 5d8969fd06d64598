#!/usr/bin/env bash
# tags.sh: prints the build tags of this machine: cuda always, rdma where a C
# compiler finds the verbs headers, and the machine is one that has them (if not,
# a line on stderr says so). The binary finds the drivers themselves at run time.
set -euo pipefail
case $(uname -m) in
x86_64 | aarch64) ;;
*)
	echo "tags: rdma is left out: it is for x86_64 and aarch64, this is $(uname -m)" >&2
	echo cuda
	exit
	;;
esac
if echo '#include <infiniband/verbs.h>' | ${CC:-cc} -E -x c - >/dev/null 2>&1; then
	echo cuda,rdma
else
	echo "tags: rdma is left out: this machine has no infiniband/verbs.h (Debian: apt-get install libibverbs-dev)" >&2
	echo cuda
fi
