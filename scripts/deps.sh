#!/usr/bin/env bash
# deps.sh [--check] [build|check|test|vm|rdma|cuda|bench]
#
# Says what this machine lacks to build kvferry (build), to check it (check),
# to run all of its tests (test, the default) or those in a throw-away machine
# alone (vm), to run those of RDMA (rdma) or of GPUs (cuda) too, or its benchmarks
# (bench), and installs it by apt where it may: as root, or by a sudo that asks nothing.
#
# --check installs nothing. Exit: 0 all there; 2 something is missing and
# cannot be installed from here (the one command that would is printed);
# with --check, 1 something is missing that a run without --check would install.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "deps: $*"; }
die() { echo "deps: $*" >&2; exit 2; }

check=
[ "${1:-}" = --check ] && { check=1; shift; }
scope=${1:-test}
case $scope in build | check | test | vm | rdma | cuda | bench) ;; *) die "usage: deps.sh [--check] [build|check|test|vm|rdma|cuda|bench]" ;; esac
export PATH=$PATH:/usr/local/go/bin:/usr/sbin:/sbin

missing=() # packages of Debian
lack() {   # PACKAGE WHAT
	say "missing: $2 (package $1)"
	missing+=("$1")
}
need() { # COMMAND PACKAGE
	command -v "$1" >/dev/null || lack "$2" "$1"
}

# ---- build: a C compiler with its headers (the race detector and the drivers
# use cgo), make, Go.
need make make
if ! command -v gcc >/dev/null; then
	lack gcc gcc
	lack libc6-dev "the C library's headers"
elif ! echo '#include <stdlib.h>' | gcc -E -x c - >/dev/null 2>&1; then
	lack libc6-dev "the C library's headers"
fi

# go_minor prints the 26 of "go1.26.3": any Go from 1.21 on fetches the one
# that go.mod names.
go_minor() {
	local v
	v=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null || true)
	v=${v#go1.}
	v=${v%%[!0-9]*}
	echo "${v:-0}"
}
apt_go_minor() {
	local v
	v=$(apt-cache policy golang-go 2>/dev/null | sed -n 's/^ *Candidate: *\([0-9]*:\)\{0,1\}1\.\([0-9]*\).*/\2/p')
	echo "${v:-0}"
}
if ! command -v go >/dev/null || [ "$(go_minor)" -lt 21 ]; then
	if [ "$(apt_go_minor)" -ge 21 ]; then
		lack golang-go "go 1.21 or newer"
	else
		die "missing: go 1.21 or newer, and this system's archive has none; install it from https://go.dev/dl/ and put it on PATH"
	fi
fi

# ---- check: the model checker of docs/model, which uses gcc too.
[ "$scope" != check ] || need spin spin

# ---- bench: the yardsticks of the TCP figures and, where there is a device, of
# RDMA's. That of shared memory, memcpy, takes the C compiler that building does.
if [ "$scope" = bench ]; then
	need iperf3 iperf3
	[ -z "$(ls /sys/class/infiniband 2>/dev/null)" ] || need ib_read_bw perftest
fi

# ---- test, rdma, bench: what the tag rdma takes (scripts/tags.sh).
if [[ $scope == test || $scope == rdma || $scope == bench ]] && ! scripts/tags.sh 2>/dev/null | grep -q rdma; then
	case $(uname -m) in
	x86_64 | aarch64) lack libibverbs-dev infiniband/verbs.h ;;
	esac
fi

# ---- test, vm, rdma: a throw-away machine with Soft-RoCE devices (scripts/vm.sh).
bootable() {
	local kernel
	for kernel in /boot/vmlinuz-*; do
		[ -r "$kernel" ] && modprobe -S "${kernel#/boot/vmlinuz-}" -n rdma_rxe 2>/dev/null && return
	done
	return 1
}
if [[ $scope == test || $scope == vm || $scope == rdma ]] && [ "$(uname -m)" = x86_64 ]; then
	need qemu-system-x86_64 qemu-system-x86
	need busybox busybox-static
	need cpio cpio
	need ip iproute2
	need rdma iproute2
	need modprobe kmod
	need xz xz-utils
	need setpriv util-linux
	bootable || lack linux-image-amd64 "a kernel in /boot with the module rdma_rxe"
	ldconfig -p 2>/dev/null | grep 'libibverbs\.so\.1 ' >/dev/null || lack libibverbs1 libibverbs.so.1
	[ -e /etc/libibverbs.d/rxe.driver ] || lack ibverbs-providers "libibverbs' provider rxe"
fi

# ---- rdma: the yardstick, and what delays and loses packets.
if [ "$scope" = rdma ]; then
	need ib_read_bw perftest
	need tc iproute2
fi

# ---- cuda: what the other machine's library is tried with, and the wheels of
# NVIDIA's headers.
if [ "$scope" = cuda ]; then
	need readelf binutils
	python3 -m pip --version >/dev/null 2>&1 || lack python3-pip "python3 with pip"
	if [ "$(uname -m)" = x86_64 ] && ! command -v aarch64-linux-gnu-gcc >/dev/null; then
		lack gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc
		lack libc6-dev-arm64-cross "the C library's headers for it"
	fi
fi

if [ ${#missing[@]} -eq 0 ]; then
	say "all there for $scope"
	exit 0
fi
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

root=() # what makes a command run as root; "no" if nothing does
if [ "$(id -u)" -ne 0 ]; then
	if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then root=(sudo -n); else root=(no); fi
fi
if ! command -v apt-get >/dev/null; then
	die "this system has no apt-get; install what stands above by its own means"
fi
if [ "${root[*]}" = no ]; then
	echo "deps: not root, and sudo would ask; run:" >&2
	echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
	exit 2
fi
[ -z "$check" ] || exit 1

apt() {
	"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" </dev/null
}
say "installing: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ apt update && apt install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 || {
	tail -n 20 "$log" >&2
	die "apt-get failed (above); run: apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
}
scripts/deps.sh --check "$scope" || die "apt-get succeeded, and what stands above is still missing"
