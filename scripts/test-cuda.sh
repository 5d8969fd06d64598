#!/usr/bin/env bash
# test-cuda.sh [JOB...]
#
# Everything of GPUs on machines without one: the emulated driver of cuda/cudatest
# takes the place of NVIDIA's, and the binary is the one that is shipped. Jobs:
#   off       without the tag, without cgo, and with the tag but without cgo
#   plain     the binary where there is no driver: it starts, and says why not
#   driver    the emulated driver itself, and how it is built for the other machine
#   suite     all tests that use it, under the race detector: conformance, two
#             processes, memory by descriptors, dma-buf, counts of calls, faults
#   stress    the random ones of them for SOAK=30s each, under the race detector
#   variants  all tests once more on every other driver that cudatest knows
# One line a job, with its seconds; of a job that fails, what it said.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin

tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvc.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
	echo "test-cuda: $*" >&2
	exit 1
}
unset KVFERRY_CUDA_GPU KVFERRY_CUDA_VARIANT KVFERRY_CUDA_WORLD
environment=$(scripts/cuda-env.sh) || fail "nothing to test without a C compiler (above)"
tags=$(scripts/tags.sh 2>/dev/null)

# Packages that are about GPUs, of which all is run, and others, of which only the
# tests of those files are that use the emulated driver.
packages=(./cuda ./cuda/cudatest ./transfer/cudaipc)
others() {
	grep -rls 'kvferry/cuda/cudatest"' --include=*_test.go . | xargs -n1 dirname | sort -u | grep -vxF "$(printf '%s\n' "${packages[@]}")" || true
}
tests_of() { # PACKAGE: a pattern for -run
	grep -ls 'kvferry/cuda/cudatest"' "$1"/*_test.go | xargs sed -n 's/^func \(Test[A-Za-z0-9_]*\)(t .*/\1/p' | grep -vx TestMain | paste -sd'|' | sed 's/.*/^(&)$/'
}

job_off() {
	CGO_ENABLED=0 go build ./...
	CGO_ENABLED=0 go test -count=1 ./cuda/...
	CGO_ENABLED=0 go test -count=1 -run '^TestSuite$' ./transfer/shm ./transfer/tcp
	CGO_ENABLED=0 go build -tags "$tags" ./...
	CGO_ENABLED=0 go test -count=1 -tags "$tags" ./cuda/... ./transfer/cudaipc
}

job_plain() {
	eval "$environment"
	go build -trimpath -tags "$tags" -o "$tmp/kvferry" ./cmd/kvferry
	"$tmp/kvferry" version
	if readelf -d "$tmp/kvferry" | grep -i 'NEEDED.*cuda'; then
		echo "the binary does not start without libcuda.so.1"
		return 1
	fi
	if ls /dev/nvidiactl 2>/dev/null; then
		echo "this machine has a driver: only the start was tried"
		return
	fi
	"$tmp/kvferry" doctor >"$tmp/doctor" 2>&1 || true
	grep -i 'cuda' "$tmp/doctor"
	grep -qi 'cuda.*no driver' "$tmp/doctor"
}

job_driver() {
	eval "$environment"
	go test -race -count=1 -v ./cuda/cudatest
	cross=aarch64-linux-gnu-gcc
	if [ "$(uname -m)" = x86_64 ] && command -v $cross >/dev/null; then
		CC=$cross go test -count=1 -v -run '^TestBuild$' ./cuda/cudatest
		(
			unset CGO_CFLAGS CGO_LDFLAGS
			export CC=$cross GOARCH=arm64 CGO_ENABLED=1
			eval "$(scripts/cuda-env.sh)"
			go build -tags cuda ./cuda/... ./transfer/cudaipc ./cmd/kvferry
		)
	else
		echo "NOT TESTED: aarch64: there is no $cross"
	fi
}

job_suite() {
	eval "$environment"
	local package
	: >"$tmp/tested"
	export KVFERRY_TESTED_FILE=$tmp/tested
	go test -race -count=1 -timeout 5m -v -tags "$tags" "${packages[@]}"
	for package in $(others); do
		go test -race -count=1 -timeout 5m -v -tags "$tags" -run "$(tests_of "$package")" "$package"
	done
	grep -qx cudaipc "$tmp/tested" || {
		echo "the suite of the transport cudaipc has not run"
		return 1
	}
}

job_stress() {
	eval "$environment"
	local package
	for package in "${packages[@]}"; do
		if grep -lqs '"soak"' "$package"/*_test.go; then
			go test -race -count=1 -timeout 30m -tags "$tags" -run 'Soak|Every|Random|Kill' "$package" -soak="${SOAK:-30s}"
		fi
	done
}

job_variants() {
	eval "$environment"
	local variant variants
	mapfile -t variants < <(sed -n '/^func variants/,/^}/s/^\t\t"\([^"]*\)": .*/\1/p' cuda/cudatest/cudatest.go)
	[ ${#variants[@]} -ge 6 ] || {
		echo "no variants found in cuda/cudatest/cudatest.go"
		return 1
	}
	for variant in "${variants[@]}"; do
		echo "variant $variant"
		KVFERRY_CUDA_VARIANT=$variant go test -count=1 -timeout 5m -tags "$tags" ./cuda ./transfer/cudaipc || {
			echo "variant $variant FAILED"
			return 1
		}
	done
	echo "${#variants[@]} variants: ${variants[*]}"
}

jobs=("$@")
[ ${#jobs[@]} -gt 0 ] || jobs=(off plain driver suite stress variants)
for job in "${jobs[@]}"; do
	declare -F "job_$job" >/dev/null || {
		sed -n '2,15s/^# \{0,1\}//p' "$0" >&2
		exit 2
	}
done
failed=0
for job in "${jobs[@]}"; do
	begin=$SECONDS verdict=ok
	(set -e && "job_$job") >"$tmp/log" 2>&1 &
	wait $! || verdict=FAIL
	if [ $verdict = FAIL ]; then
		failed=1
		scripts/readable.sh <"$tmp/log"
	fi
	printf '%-5s%-10s%4d s  %s\n' $verdict "$job" $((SECONDS - begin)) "$(grep -iE 'NOT TESTED|variants: |cuda.*no driver|only the start' "$tmp/log" | tail -1)"
done
[ $failed = 0 ] || fail "a job failed (alone: scripts/test-cuda.sh JOB)"
