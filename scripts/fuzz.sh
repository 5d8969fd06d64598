#!/usr/bin/env bash
# fuzz.sh TIME: runs every fuzz test of the module for so long. What breaks one
# is kept by go test under testdata/fuzz, to be committed with the mending.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:?usage: fuzz.sh TIME}
status=0
while IFS=: read -r file name; do
	echo "== $name in $(dirname "$file")"
	go test "./$(dirname "$file")" -run '^$' -fuzz "^$name\$" -fuzztime "$time" || status=1
done < <(grep -roh --include=*_test.go -E '^func Fuzz[A-Za-z0-9_]*' --with-filename . | sed 's|^\./||; s/:func /:/' | sort)
exit "$status"
