#!/usr/bin/env bash
# test.sh [PART...]
#
# Runs all tests, or some parts of them: build static vet race vm demo. Says
# how long each part took, which transports were tested, and what was skipped
# and why. Ends at the first part that fails, with status 1.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin:/usr/sbin:/sbin

tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvt.XXXXXX")
running= # the process group of the part that runs
finish() {
	trap '' INT TERM
	if [ -n "$running" ]; then
		kill -TERM -- "-$running" 2>/dev/null || true
		# All of it, before its files go: a cluster finds its nodes by them.
		local until=$((SECONDS + 30))
		while kill -0 -- "-$running" 2>/dev/null && [ "$SECONDS" -lt "$until" ]; do
			sleep 0.1
		done
	fi
	rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
notes=$tmp/notes # what the last lines say
: >"$notes"

fail() {
	echo "test: $*" >&2
	return 1
}

tags=$(scripts/tags.sh) # which says what is left out
has_rdma() { [[ $tags == *rdma* ]]; }
# Every build with the tag cuda needs this; without a C compiler it is as if it
# had no tag.
no_cuda=
if environment=$(scripts/cuda-env.sh 2>"$tmp/no_cuda"); then
	eval "$environment"
else
	no_cuda=$(cat "$tmp/no_cuda")
fi

# ---- build: the binary as it is shipped, and everything without a tag.
part_build() {
	go build ./...
	go build -trimpath -tags "$tags" -o bin/kvferry ./cmd/kvferry
	bin/kvferry version
}

# ---- static: without a C compiler.
part_static() {
	CGO_ENABLED=0 go build -trimpath -o "$tmp/kvferry" ./cmd/kvferry
	"$tmp/kvferry" version >/dev/null
}

# ---- vet: what the compiler lets pass, and the import table.
part_vet() {
	go vet ./...
	go vet -tags "$tags" ./...
	go test -count=1 ./internal/layers
}

# ---- race: every test, under the race detector; those of RDMA by emulated verbs,
# those of GPUs by an emulated driver.
part_race() {
	local log=$tmp/race.log tested=$tmp/tested status=0 transports=(memory shm tcp)
	: >"$tested"
	[ -z "$no_cuda" ] || echo "CUDA NOT TESTED: $no_cuda" | tee -a "$notes"
	env -u KVFERRY_RDMA_DEVICE -u KVFERRY_CUDA_GPU -u KVFERRY_CUDA_VARIANT KVFERRY_TESTED_FILE="$tested" \
		go test -race -v -timeout 15m -tags "$tags" ./... 2>&1 | tee "$log" | scripts/readable.sh || status=$?
	[ "$status" -eq 0 ] || return "$status"
	sort -u "$tested" | sed 's/^rdma$/& (emulated verbs)/; s/^cudaipc$/& (emulated driver)/' | paste -sd' ' | sed 's/^/transports tested: /' >>"$notes"
	sed -n 's/^ *\(rdma\|probe\)_test\.go:[0-9]*: .*reason /not on this machine: /p' "$log" | grep -v 'nil>$' >>"$notes" || true
	# These need nothing but the kernel, and a C compiler with headers.
	if has_rdma; then
		transports+=(rdma)
	else
		echo "RDMA NOT TESTED: $(scripts/tags.sh 2>&1 >/dev/null)" | tee -a "$notes"
	fi
	if [ -z "$no_cuda" ]; then
		transports+=(cudaipc)
	fi
	local transport
	for transport in "${transports[@]}"; do
		grep -qx "$transport" "$tested" || fail "the transport $transport can run here and was not tested"
	done
}

# ---- vm: the static binary and tests of devices in a throw-away machine.
part_vm() {
	if [ "$(uname -m)" != x86_64 ]; then
		echo "VM NOT TESTED: scripts/vm.sh boots x86_64 only, this is $(uname -m)" | tee -a "$notes"
		return
	fi
	local status=0
	scripts/deps.sh --check vm || status=$?
	case $status in
	0) ;;
	1) fail "the machine could run the VM: run scripts/deps.sh first" ;;
	*)
		echo "VM NOT TESTED: what stands above is missing, and cannot be installed from here" | tee -a "$notes"
		return
		;;
	esac
	local root=$tmp/root log=$tmp/vm.log transport transports=(shm tcp)
	[ -x "$tmp/kvferry" ] || part_static
	mkdir -p "$root"
	cp "$tmp/kvferry" "$root/kvferry.static"
	CGO_ENABLED=0 scripts/test-binaries.sh "$root" internal/memory transfer/shm transfer/tcp
	if has_rdma; then
		scripts/test-binaries.sh "$root" rdma transfer/rdmaread
		transports+=(rdma)
	fi
	# With huge pages, which the host may not have: the test must not skip there.
	KVFERRY_VM_TIMES=1 KVFERRY_VM_TIMEOUT=300 KVFERRY_VM_HUGE=16 KVFERRY_VM_FILES=$root:/root \
		scripts/vm.sh scripts/guest.sh smoke | tee "$log" | scripts/readable.sh
	sed -n 's/^tested in the VM: //p' "$log" | sort -u >"$tmp/vm.tested"
	sed 's/^rdma$/& (Soft-RoCE)/' "$tmp/vm.tested" | paste -sd' ' | sed 's/^/in the VM: /' >>"$notes"
	for transport in "${transports[@]}"; do
		grep -qx "$transport" "$tmp/vm.tested" || fail "the transport $transport can run in the VM and was not tested"
	done
}

# nothing_left fails if a process or a file of the demo is still there.
nothing_left() { # DIRECTORY
	local left
	left=$(find "$1" -mindepth 1)
	[ -z "$left" ] || fail "the demo left files behind: $left"
	left=$(grep -lsz -- "^XDG_RUNTIME_DIR=$1/" /proc/[0-9]*/environ || true)
	[ -z "$left" ] || fail "the demo left processes behind: $left"
}

# ---- demo: as a newcomer runs it, and interrupted.
part_demo() {
	local dir=$tmp/d out=$tmp/demo.out pid status=0
	[ -x bin/kvferry ] || part_build
	mkdir -p "$dir"
	TMPDIR=$dir make -s demo
	nothing_left "$dir"

	TMPDIR=$dir make -s demo >"$out" 2>&1 &
	pid=$!
	local until=$((SECONDS + 60))
	until grep -q 'nodes ready' "$out"; do
		kill -0 "$pid" 2>/dev/null || break
		[ "$SECONDS" -lt "$until" ] || break
		sleep 0.1
	done
	kill -TERM "$pid" 2>/dev/null || true
	wait "$pid" || status=$?
	[ "$status" -ne 0 ] || fail "an interrupted demo ended with status 0: $(cat "$out")"
	grep -q 'nodes ready' "$out" || fail "the demo never came up: $(cat "$out")"
	nothing_left "$dir"
	echo "interrupted after it came up: status $status, nothing left behind"

	# Twice within a moment, as make and a terminal do, at any time.
	local n
	for n in 1 2 3 4 5; do
		TMPDIR=$dir scripts/with-cluster.sh --prefill 1 --decode 1 -- members --watch=50ms >"$out" 2>&1 &
		pid=$! status=0
		sleep "0.$((RANDOM % 9 + 1))"
		kill -TERM "$pid"
		sleep "0.000$((RANDOM % 4 + 1))"
		kill -TERM "$pid" 2>/dev/null || true
		wait "$pid" || status=$?
		[ "$status" -eq 143 ] || fail "interrupted twice: status $status, want 143: $(cat "$out")"
		nothing_left "$dir"
	done
	echo "interrupted twice, $n times: nothing left behind"
}

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(build static vet race vm demo)
times=()
for part in "${parts[@]}"; do
	declare -F "part_$part" >/dev/null || {
		sed -n '4,6s/^# //p' "$0" >&2
		exit 2
	}
	echo "== $part"
	begin=$SECONDS status=0
	# In a process group of its own, so that an interrupted part takes all
	# that it started with it; in the background, so that set -e holds inside.
	set -m
	(trap - EXIT INT TERM && "part_$part") &
	running=$!
	set +m
	wait "$running" || status=$?
	running=
	times+=("$part $((SECONDS - begin)) s")
	if [ "$status" -ne 0 ]; then
		echo "test: part $part FAILED after $((SECONDS - begin)) s (alone: scripts/test.sh $part)" >&2
		exit 1
	fi
done
cat "$notes"
printf -v list '%s, ' "${times[@]}"
echo "all parts passed: ${list%, }"
