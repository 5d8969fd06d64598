#!/usr/bin/env bash
# generated.sh: fails if generated code is not what generating it again gives.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
cp -r api .ci go.mod go.sum "$fresh"
(cd "$fresh/api" && rm -f kvferrypb/*.pb.go && go tool -modfile=../.ci/tools.mod buf generate)
diff -ru api/kvferrypb "$fresh/api/kvferrypb" || {
	echo "generated: api/kvferrypb is not what its .proto files give: run make generate" >&2
	exit 1
}
