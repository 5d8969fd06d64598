#!/usr/bin/env bash
# cuda-headers.sh: compares our cuda.h with NVIDIA's of CUDA 12.9 and 13.0, out of
# the wheels of PyPI: constants, sizes, and offsets by a program that both compile,
# prototypes in one unit, and by its comments which results break a context. Then
# it builds gorgonia.org/cu and package cuda with NVIDIA's headers (through
# scripts/cuda-compat.h), and has ptxas accept our PTX.
# What is downloaded (about 80 MB) goes when it ends.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/go/bin

fail() {
	echo "cuda-headers: $*" >&2
	exit 1
}
command -v python3 >/dev/null && python3 -m pip --version >/dev/null || fail "python3 with pip fetches the wheels, and is not there"
[ "$(uname -m)" = x86_64 ] || fail "the wheels that are compared are those of x86_64, this is $(uname -m)"
eval "$(scripts/cuda-env.sh)"
own=cuda/internal/driver/include
tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvh.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

wheel() { # PACKAGE VERSION: unpacks it, and says into which folder
	local package=$1 version=$2 dir=$tmp/$1-${2%.*}
	python3 -m pip --disable-pip-version-check download -q --no-deps --no-cache-dir --only-binary :all: -d "$dir.wheel" "$package==$version" >&2
	python3 -m zipfile -e "$dir.wheel"/*.whl "$dir"
	rm -r "$dir.wheel"
	echo "$dir"
}

# only prints the one file of a name below a folder.
only() { # DIRECTORY PATTERN
	local found
	found=$(find "$1" -path "$2")
	[ -f "$found" ] || fail "no $2 in ${1##*/}: ${found:-nothing}"
	echo "$found"
}

python3 scripts/cuda-abi.py constants "$own/cuda.h" >"$tmp/constants.c"
python3 scripts/cuda-abi.py prototypes "$own/cuda.h" >"$tmp/prototypes.c"
${CC:-cc} -I"$own" -o "$tmp/own" "$tmp/constants.c"
"$tmp/own" >"$tmp/own.txt"

compare() { # NAME INCLUDE
	local differ
	${CC:-cc} -I"$2" -o "$tmp/theirs" "$tmp/constants.c"
	"$tmp/theirs" >"$tmp/theirs.txt"
	differ=$(diff "$tmp/own.txt" "$tmp/theirs.txt") || fail "our header (<) and that of $1 (>) differ:
$differ"
	${CC:-cc} -I"$2" -fsyntax-only "$tmp/prototypes.c" || fail "our prototypes are not those of $1 (above)"
	differ=$(KVFERRY_CUDA_HEADER=$2/cuda.h go test -count 1 -run '^TestStickyIsAsTheHeaderSays$' ./cuda/internal/driver) || fail "other results break a context by the header of $1:
$differ"
	echo "$1: $(wc -l <"$tmp/own.txt") constants, sizes, and offsets are the same, and $(grep -c '^CUresult' "$tmp/prototypes.c") prototypes"
}

mkdir "$tmp/compat"
cp scripts/cuda-compat.h "$tmp/compat/cuda.h"
build() { # NAME INCLUDE
	CGO_CFLAGS="-I$tmp/compat -I$2 -O2 -g -Werror=implicit-function-declaration -Werror=incompatible-pointer-types" \
		go build -tags cuda gorgonia.org/cu ./cuda/... || fail "it does not build with the headers of $1"
	echo "$1: gorgonia.org/cu and package cuda build"
}

for version in 12.9 13.0; do
	package=nvidia-cuda-runtime
	[ $version != 12.9 ] || package+=-cu12
	dir=$(wheel $package "$version.*")
	header=$(only "$dir" '*/include/cuda.h')
	include=${header%/cuda.h}
	compare "CUDA $version" "$include"
	build "CUDA $version" "$include"
done

for version in 12.9 13.0; do
	package=nvidia-cuda-nvcc
	[ $version != 12.9 ] || package+=-cu12
	dir=$(wheel $package "$version.*")
	ptxas=$(only "$dir" '*/bin/ptxas')
	chmod +x "$ptxas"
	for ptx in cuda/internal/ptx/*.ptx; do
		for arch in sm_80 sm_90 sm_100; do
			"$ptxas" -arch="$arch" -v -o /dev/null "$ptx" 2>"$tmp/ptxas.txt" || fail "ptxas of CUDA $version refuses $ptx for $arch: $(cat "$tmp/ptxas.txt")"
			grep -q ' 0 bytes spill stores, 0 bytes spill loads' "$tmp/ptxas.txt" || fail "$ptx spills registers on $arch: $(cat "$tmp/ptxas.txt")"
			echo "ptxas $version $arch: ${ptx##*/}:$(sed -n 's/.*: Used\( [0-9]* registers\).*/\1/p' "$tmp/ptxas.txt")"
		done
	done
	rm -r "$dir"
done
