#!/usr/bin/env bash
# tags.sh: prints the build tags of this machine: cuda always, rdma where the
# verbs headers are found (if not, a line on stderr says so). The binary finds
# the drivers themselves at run time.
set -euo pipefail
if echo '#include <infiniband/verbs.h>' | ${CC:-cc} -E -x c - >/dev/null 2>&1; then
	echo cuda,rdma
else
	echo "tags: rdma is left out: this machine has no infiniband/verbs.h (Debian: libibverbs-dev)" >&2
	echo cuda
fi
