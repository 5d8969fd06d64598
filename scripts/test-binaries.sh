#!/usr/bin/env bash
# test-binaries.sh DIR PACKAGE...: the tests of each package as a program,
# DIR/PACKAGE/NAME.test, with its testdata beside it, and the page that those of
# rdma look into, for scripts/vm.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:?usage: test-binaries.sh DIR PACKAGE...}
shift
tags=$(scripts/tags.sh 2>/dev/null)
eval "$(scripts/cuda-env.sh)"
mkdir -p "$dir/docs"
cp docs/rdma.md "$dir/docs"
for package; do
	mkdir -p "$dir/$package"
	go test -c -tags "$tags" -o "$dir/$package/${package##*/}.test" "./$package"
	[ ! -d "$package/testdata" ] || cp -r "$package/testdata" "$dir/$package"
done
