# Every task, one help line each. `make` prints them.

TAGS  = $(shell scripts/tags.sh)
# What a build with the tag cuda finds our header and library by; nothing, and why,
# where there is no C compiler.
CUDA  = eval "$$(scripts/cuda-env.sh)";
TOOL  = go tool -modfile=.ci/tools.mod
LINT  = $(TOOL) golangci-lint
SOAK ?= 10m
FUZZ ?= 60s

.DEFAULT_GOAL := help
.PHONY: help build demo test race check model fuzz bench soak starve test-rdma test-cuda cuda-headers gpu-bundle generate docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

build: ## the one binary, bin/kvferry
	@scripts/deps.sh build
	$(CUDA) go build -trimpath -tags "$(TAGS)" -o bin/kvferry ./cmd/kvferry

demo: build ## two prefill and two decode processes, a trace through them, every byte checked
	@scripts/with-cluster.sh --prefill 2 --decode 2 -c configs/local.yaml -- replay configs/traces/demo.jsonl

test: ## all tests, the race detector included (some minutes; scripts/test.sh runs parts of it)
	@scripts/deps.sh test || scripts/deps.sh build
	@scripts/test.sh

race: ## the Go tests alone, under the race detector, not from the cache
	$(CUDA) go test -race -count=1 -timeout 15m -tags "$(TAGS)" ./...

check: ## format, lint, import table, that go.mod and generated code are as they would be made, and the model
	@scripts/deps.sh check
	$(LINT) config verify -c .ci/golangci.yml
	$(LINT) fmt -c .ci/golangci.yml --diff
	$(CUDA) $(LINT) run -c .ci/golangci.yml
	$(CUDA) $(LINT) run -c .ci/golangci.yml --build-tags cuda,rdma
	go mod tidy -diff
	go test -count=1 ./internal/layers
	scripts/generated.sh
	scripts/model.sh

model: ## the model of read safety alone (docs/model); M="NAME...": some of its runs, with their counterexamples
	@scripts/deps.sh check
	@scripts/model.sh $(M)

fuzz: ## every fuzz test for FUZZ=60s
	scripts/fuzz.sh $(FUZZ)

bench: ## the figures of docs/benchmarks.md, which it writes
	@scripts/deps.sh bench
	@$(MAKE) build
	scripts/with-cluster.sh --prefill 1 --decode 1 -- bench -o markdown --plot bin/benchmarks.svg >bin/benchmarks.md
	mv bin/benchmarks.md bin/benchmarks.svg docs/
	@sed -n '/^## Promises/,/^## Method/p' docs/benchmarks.md
	go test -run '^$$' -bench . -benchmem ./internal/page ./transfer ./manager ./api/wire
	$(CUDA) go test -tags "$(TAGS)" -count=1 -v -run '^Test(ReadDepthIsMadeUpFor|SecondDeviceAdds|SlowDeviceCostsNothing|PagesAllocateNothing|GatherWireAndScatterOverlap)$$' -bench 'Fill|Submit' ./transfer/rdmaread

soak: ## the random tests for SOAK=10m each, under the race detector
	$(CUDA) go test -race -count=1 -timeout 0 -tags "$(TAGS)" $$(grep -lrs '"soak"' --include=*_test.go . | xargs -n1 dirname | sort -u) -soak=$(SOAK)

starve: ## the Go tests, or those of P=./PACKAGE, as on a machine that has no time for them (Linux, as root)
	$(CUDA) scripts/starve.sh go test -race -count=1 -timeout 0 -tags "$(TAGS)" $(or $(P),./...)

test-rdma: ## everything of RDMA in throw-away machines with Soft-RoCE devices, slow and lossy links and figures included
	@scripts/deps.sh rdma
	@scripts/test-rdma.sh

test-cuda: ## everything of GPUs on the emulated driver: without it, conformance, stress, faults, and every variant
	@scripts/deps.sh cuda
	@scripts/test-cuda.sh

cuda-headers: ## our cuda.h and PTX against NVIDIA's headers and ptxas, which are downloaded
	@scripts/deps.sh cuda
	@scripts/cuda-headers.sh

gpu-bundle: ## .gpu, all that scripts/gpu-check.sh needs on a machine with a GPU, prebuilt
	@scripts/gpu/bundle.sh

generate: ## api/kvferrypb from its .proto files
	cd api && go tool -modfile=../.ci/tools.mod buf generate

docs: ## docs/cli from the commands
	go test ./cmd/kvferry -count=1 -run TestDocs -update

clean: ## removes what the targets made
	rm -rf bin .gpu
