#!/usr/bin/env bash
# test-rdma.sh [PART...]
#
# Everything of RDMA on real verbs, in throw-away machines with two Soft-RoCE
# devices (scripts/vm.sh). Parts: suite, every test of the verbs and of the
# transport that a device can pass; replay, of a trace between two nodes, and what
# that costs the owner; devices, the same between arenas in the memory of emulated
# GPUs; delay and loss, the transport's suite and the replay on a link that takes
# 1 ms each way, and on one that loses one packet in 1,000; bench, figures beside
# ib_read_bw. A test that skips fails, but for faults that only the
# emulated verbs of make test can make, and what is for long runs alone. Figures
# below what is promised are told, and fail nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin:/usr/sbin:/sbin

fail() {
	echo "test-rdma: $*" >&2
	exit 1
}
[ "$(uname -m)" = x86_64 ] || fail "scripts/vm.sh boots x86_64 only, this is $(uname -m)"
tags=$(scripts/tags.sh)
eval "$(scripts/cuda-env.sh)"
[[ $tags == *rdma* ]] || fail "nothing to test without the tag rdma (above)"

tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvr.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
root=$tmp/root
mkdir -p "$root/configs"
cp -r configs/traces "$root/configs"
go build -trimpath -tags "$tags" -o "$root/kvferry" ./cmd/kvferry
scripts/test-binaries.sh "$root" rdma transfer/rdmaread

# guest SECONDS PART...: parts of scripts/guest.sh, in a machine of their own.
guest() {
	local timeout=$1
	shift
	KVFERRY_VM_TIMES=1 KVFERRY_VM_TIMEOUT=$timeout KVFERRY_VM_FILES=$root:/root \
		scripts/vm.sh scripts/guest.sh "$@" | tee "$tmp/log" | scripts/readable.sh
}
# tested fails if the transport's suite has not passed in the machine.
tested() { grep -qx 'tested in the VM: rdma' "$tmp/log" || fail "the suite of the transport has not run"; }

part_suite() {
	guest 900 suite
	tested
}
part_replay() {
	guest 300 replay
	guest 300 calls
}
part_devices() {
	local library
	library=$(go test -count=1 -v -run '^TestBuild$' ./cuda/cudatest | sed -n 's/.*built: //p')
	[ -n "$library" ] || fail "no emulated driver: it takes a C compiler"
	cp "$library" "$root/libcuda.so.1"
	guest 300 devices
}
part_delay() {
	KVFERRY_VM_NETEM="delay 1ms" guest 600 link
	tested
	grep -q 'qdisc netem .* delay 1ms' "$tmp/log" || fail "nothing was delayed"
}
part_loss() {
	KVFERRY_VM_NETEM="loss 0.1%" guest 600 link
	tested
	grep -q '(dropped [1-9]' "$tmp/log" || fail "no packet was lost"
}
part_bench() { guest 300 bench; }

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(suite replay devices delay loss bench)
times=()
for part in "${parts[@]}"; do
	declare -F "part_$part" >/dev/null || {
		sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
		exit 2
	}
	echo "== $part"
	begin=$SECONDS
	"part_$part"
	times+=("$part $((SECONDS - begin)) s")
done
printf -v list '%s, ' "${times[@]}"
echo "all parts of RDMA passed: ${list%, }"
