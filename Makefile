# `make` alone lists the targets. Everything runs from a fresh clone; what is missing is installed first (make deps).
SHELL      := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN        := $(CURDIR)/bin
TOOLS      := $(CURDIR)/.cache/tools
APILINT    := $(TOOLS)/apilint
GO         := go
APP        ?= demo
# The end-to-end tests: the packages whose main function runs them in a sandbox, the longest first.
LONGEST    := ./e2e/lifecycle ./e2e/guide ./e2e/chaos
E2E        := $(LONGEST) $(filter-out $(LONGEST),$(patsubst %/main_test.go,./%,$(shell \
	grep -l harness.RunTests e2e/*/main_test.go)))
LDFLAGS    := -s -w
BINARIES   := gpuaas-hub gpuaas-agent gpuaas

GOLANGCI_VERSION := v2.15.0
PROTOC_GEN_GO    := v1.36.12

export PATH := $(TOOLS):$(PATH)
export CGO_ENABLED ?= 0
# One way to compile everything: what the linters load, the tests link and the programs are made of is compiled once.
export GOFLAGS := -trimpath

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

.PHONY: deps
deps: ## install only the binaries that are missing (root; Debian 12)
	@deploy/deps.sh run

.PHONY: build
build: $(addprefix $(BIN)/,$(BINARIES)) $(BIN)/gpuaas-nvml ## build the programs into bin/

$(BIN)/gpuaas-hub: FORCE
	@$(GO) build -buildvcs=auto -ldflags '$(LDFLAGS)' -o $@ ./hub/cmd/gpuaas-hub
$(BIN)/gpuaas-agent: FORCE
	@$(GO) build -buildvcs=auto -ldflags '$(LDFLAGS)' -o $@ ./agent/cmd/gpuaas-agent
$(BIN)/gpuaas: FORCE
	@$(GO) build -buildvcs=auto -ldflags '$(LDFLAGS)' -o $@ ./pkg/cmd/gpuaas
# The one program with cgo: without gcc it is left out, and a node that has NVIDIA's driver says that nothing asks it.
$(BIN)/gpuaas-nvml: FORCE
	@if command -v gcc >/dev/null; then \
		CGO_ENABLED=1 $(GO) build -buildvcs=auto -ldflags '$(LDFLAGS)' -o $@ ./agent/cmd/gpuaas-nvml; \
	else echo 'no gcc: gpuaas-nvml, which a node with NVIDIA GPUs needs, is not built (make deps)'; fi
FORCE:

.PHONY: wheel
wheel: ## build the Python SDK's wheel into bin/
	@$(GO) run ./deploy/pythonsdk wheel pkg/client/python $(BIN)

.PHONY: build-failpoint
build-failpoint: ## build hub and agent with failpoints into bin/failpoint/, for the tests that kill them
	@$(GO) build -tags failpoint -ldflags '$(LDFLAGS)' -o $(BIN)/failpoint/ ./hub/cmd/gpuaas-hub ./agent/cmd/gpuaas-agent

.PHONY: demo-app
demo-app:
	@$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/demo-app ./deploy/demo/app

.PHONY: demo
demo: deps build ## bring up a hub and a node that run, meter and bill a real app (APP=demo, jupyter or vllm)
	@$(GO) run ./deploy/demo up --bin $(BIN) --app $(APP)

.PHONY: demo-down
demo-down: ## take the demo down; nothing is left but the build cache
	@$(GO) run ./deploy/demo down

.PHONY: check
check: tools generate-check ## format, linters, generated files, rules of the tree
	@wrong=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$wrong" || { echo "gofmt would change: $$wrong"; exit 1; }
	@golangci-lint run ./...
	@! command -v gcc >/dev/null || CGO_ENABLED=1 golangci-lint run ./agent/cmd/gpuaas-nvml
	@NODE_PATH=$(APILINT)/node_modules hub/api/lint/lint.sh $(APILINT)/node_modules/.bin
	@$(GO) test -vet=off ./docs/... ./hub/api # links, cited documents, the tests of each law, the codes of faults
	@$(GO) mod tidy -diff && cd e2e/sqlcheck && $(GO) mod tidy -diff
	@for p in e2e/mutants/*.patch; do git apply --check $$p || { echo "$$p does not fit any more"; exit 1; }; done
	@$(GO) run ./deploy/treecheck # large files, keys, words, long files and functions

# The Git tool's callers are found by what they call, so that a new one is tested too.
.PHONY: shallow
shallow: ## what asks git works in a clone of HEAD without history
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	git clone -q --depth 1 "file://$(CURDIR)" "$$dir/tree"; cd "$$dir/tree"; \
	test "$$(git rev-list --count HEAD)" = 1; \
	for p in e2e/mutants/*.patch; do git apply --check "$$p"; done; \
	$(GO) run ./deploy/treecheck; \
	$(GO) build -buildvcs=true -ldflags '$(LDFLAGS)' -o "$$dir/" ./pkg/cmd/gpuaas; \
	$(GO) test -vet=off $$(git grep -lE 'Command(Context)?\((ctx, )?"git"' -- '*.go' | xargs -n 1 dirname | sort -u | sed 's,^,./,')

.PHONY: generate
generate: tools ## write the generated files anew
	@deploy/deps.sh generate
	@protoc --go_out=. --go_opt=paths=source_relative protocol/messages.proto
	@$(GO) generate -skip '-args -update' ./...
	@$(GO) generate ./docs/reference # last: its tests read what the others write

.PHONY: generate-check
generate-check: ## fail if generated files are not what make generate writes
	@sums() { git ls-files '*.gen.go' '*.pb.go' '*_gen.py' 'docs/reference/*.md' | xargs sha256sum; }; \
	before=$$(sums); $(MAKE) --no-print-directory generate; \
	test "$$before" = "$$(sums)" || { echo 'generated files were stale and are written anew: review and commit them'; exit 1; }

.PHONY: test
test: export GPUAAS_REQUIRE_ALL := 1
test: deps check shallow unit race-short mutants e2e ## every check: linters, unit, property, integration, mutants, end to end; no skips

.PHONY: unit
unit: ## unit, property and integration tests
	@$(GO) test -vet=off -timeout 20m $$($(GO) list ./... | grep -v $(foreach p,$(E2E),-e '$(p:./%=/%)$$')) # make check vets
	@cd e2e/sqlcheck && $(GO) test -vet=off ./... # a module of its own: CockroachDB's parser stays out of the product

.PHONY: test-gpu
test-gpu: build demo-app ## containers and a paying tenant's app use this machine's own GPUs (root, gcc; KEEP_MODE=1)
	@GPUAAS_TEST_GPU=$(if $(KEEP_MODE),keep-mode,1) $(GO) test -count=1 -p 1 -v -run OnRealGPUs ./agent/internal/runtime \
		./e2e/gpu

.PHONY: e2e
e2e: build build-failpoint demo-app ## end to end, with the real binaries; each package runs in a sandbox of its own
	@# Fetch and build what the packages need before their tests compete for the machine. No test runs; without -count=1
	@# the Go tool would also skip the preparation when it has run this very binary before.
	@out=$$($(GO) test -vet=off -count=1 -p 1 -run '^$$' ./e2e/guide ./e2e/notebook ./e2e/upgrade) || { echo "$$out"; exit 1; }
	@$(GO) test -vet=off -p 3 -parallel 1 -timeout 30m $(E2E)

# The record is a commit's: the next call with the same commit goes on where this one ends.
.PHONY: soak
soak: export GPUAAS_REQUIRE_ALL := 1
soak: build build-failpoint demo-app ## find flaky tests: each end-to-end test N (20) times; PKG=<package> RUN=<regexp> SEED=
	@$(GO) run ./e2e/soak -n $(or $(N),20) -run '$(RUN)' -seed $(or $(SEED),1) \
		-dir "$(CURDIR)/.cache/soak/$$(git rev-parse HEAD)-$$(git diff HEAD | sha256sum | cut -c 1-8)" $(or $(PKG),$(E2E))

.PHONY: release-fixture
release-fixture: deps build demo-app ## record a version's data for the upgrade tests (VERSION=, else the newest tag)
	@$(GO) run ./e2e/release/record -version '$(VERSION)'

.PHONY: bench
bench: build ## measure what is promised in numbers; ROW=<regexp> for some rows, N=<samples>, ARGS=<sizes> for a quick look
	@$(GO) run ./e2e/bench -row '$(ROW)' -n $(or $(N),0) $(ARGS)

# A commit is a name of git's; the row is a whole name, as the list of bench/README.md has it.
.PHONY: bench-compare
bench-compare: ## tell a regression from noise: A=<commit> B=<commit> ROW=<name>, PAIRS=<pairs> (10), N=<samples>
	@mkdir -p .cache
	@$(GO) run ./e2e/bench/compare -a '$(A)' -b '$(or $(B),HEAD)' -row '$(ROW)' -pairs $(or $(PAIRS),10) -n $(or $(N),0)

.PHONY: near-miss
near-miss: ## send N (100000) requests that almost follow the contract to a hub process: no 5xx, no panic, no growth
	@GPUAAS_NEAR_MISSES=$(or $(N),100000) $(GO) test -vet=off -count=1 -timeout 1h -v -run TestNearMisses \
		./hub/internal/httpapi

.PHONY: kill-points
kill-points: build build-failpoint demo-app ## kill hub and agent at each of their failpoints, REPEATS times (1)
	@GPUAAS_E2E_KILL_REPEATS=$${REPEATS:-1} $(GO) test -timeout 20m -count=1 -v \
		-run TestEverythingResumesAfterAKillAtAnyPoint ./e2e/chaos

# The packages that start a goroutine, in their code or in their tests, also through a timer, an HTTP server or a hub
# with nodes; the end-to-end packages are race-e2e's. CI runs RACE_SHORT: building everything a second time, with the
# detector, takes longer than all of CI may.
GOROUTINE  := ^\s*go (func|[A-Za-z_.]+\x28)|\.Go\x28|AfterFunc\x28|httptest\.New|hubtest\.
RACE       = $(filter-out $(E2E),$(shell grep -rlP '$(GOROUTINE)' --include='*.go' agent deploy e2e hub pkg protocol | \
	grep -v /testdata/ | xargs -n 1 dirname | sort -u | sed 's,^,./,'))
RACE_SHORT := ./pkg/duplex ./pkg/groupcommit ./pkg/keylock ./pkg/loop ./pkg/worker ./protocol/link

COVERED    := ./agent/...,./hub/...,./pkg/...,./protocol/...
COVER      := $(CURDIR)/.cache/cover

.PHONY: cover
cover: cover-unit cover-e2e ## coverage of each package by all tests; fails below LEAST (70) percent of hand-written code (long)
	@$(GO) run ./e2e/cover -module "$$($(GO) list -m)" -least $(or $(LEAST),70) $(COVER)/unit $(COVER)/e2e

# The Go tool adds what the test programs do that tests start.
.PHONY: cover-unit
cover-unit:
	@mkdir -p $(COVER)
	@$(GO) test -vet=off -coverpkg=$(COVERED) -coverprofile=$(COVER)/unit ./agent/... ./hub/... ./pkg/... ./protocol/...

# The programs write what ran when they end; those that a test kills write nothing.
.PHONY: cover-e2e
cover-e2e: build demo-app
	@rm -rf $(COVER)/programs && mkdir -p $(COVER)/programs $(BIN)/cover/failpoint
	@$(GO) build -cover -coverpkg=$(COVERED) -o $(BIN)/cover/ ./hub/cmd/gpuaas-hub ./agent/cmd/gpuaas-agent ./pkg/cmd/gpuaas
	@$(GO) build -cover -coverpkg=$(COVERED) -tags failpoint -o $(BIN)/cover/failpoint/ ./hub/cmd/gpuaas-hub \
		./agent/cmd/gpuaas-agent
	@CGO_ENABLED=1 $(GO) build -cover -coverpkg=$(COVERED) -o $(BIN)/cover/ ./agent/cmd/gpuaas-nvml
	@GOCOVERDIR=$(COVER)/programs GPUAAS_E2E_BIN=$(BIN)/cover $(GO) test -vet=off -p 1 -parallel 1 -timeout 60m \
		-run '$(RUN)' $(or $(PKG),$(E2E))
	@$(GO) tool covdata textfmt -i=$(COVER)/programs -o=$(COVER)/e2e

.PHONY: race
race: export GPUAAS_REQUIRE_ALL := 1
race: race-e2e ## every package that starts a goroutine under the race detector, and the end-to-end tests (gcc; long)
	@CGO_ENABLED=1 $(GO) test -vet=off -race -timeout 30m $(RACE)

.PHONY: race-short
race-short: ## the same for a few packages that build quickly
	@CGO_ENABLED=1 $(GO) test -vet=off -race $(RACE_SHORT)

.PHONY: race-e2e
race-e2e: export GPUAAS_REQUIRE_ALL := 1
race-e2e: build demo-app ## end to end with programs that have the race detector; PKG=<package> RUN=<regexp>
	@mkdir -p $(BIN)/race/failpoint
	@CGO_ENABLED=1 $(GO) build -race -o $(BIN)/race/ ./hub/cmd/gpuaas-hub ./agent/cmd/gpuaas-agent ./pkg/cmd/gpuaas \
		./agent/cmd/gpuaas-nvml
	@CGO_ENABLED=1 $(GO) build -race -tags failpoint -o $(BIN)/race/failpoint/ ./hub/cmd/gpuaas-hub ./agent/cmd/gpuaas-agent
	@rm -f $(BIN)/race/report.*
	@status=0; GORACE='halt_on_error=1 log_path=$(BIN)/race/report' GPUAAS_E2E_BIN=$(BIN)/race \
		$(GO) test -vet=off -p 1 -parallel 1 -timeout 60m -run '$(RUN)' $(or $(PKG),$(E2E)) || status=$$?; \
		for report in $(BIN)/race/report.*; do ! test -e $$report || { cat $$report; status=1; }; done; exit $$status

.PHONY: mutants
mutants: ## break each law on purpose, and make a few small changes: tests must notice
	@$(GO) run ./e2e/mutants

.PHONY: mutants-all
mutants-all: build build-failpoint demo-app ## as mutants, with every patch and change of the sample, and end to end (hours)
	@$(GO) run ./e2e/mutants -all
	@$(GO) run ./e2e/mutants -e2e -j 1

.PHONY: sim
sim: ## simulate more seeds than the tests do, with faults: SEEDS=a..b (default 17..80); a failing one prints its violation
	@$(GO) test -vet=off -count=1 -timeout 24h ./e2e/sim -run 'TestSimulation$$' -seeds $(or $(SEEDS),17..80)

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (default 20s) each
	@deploy/fuzz.sh $${FUZZTIME:-20s}

.PHONY: tools
tools: $(TOOLS)/golangci-lint $(TOOLS)/protoc-gen-go $(APILINT)/installed
$(TOOLS)/golangci-lint:
	@echo 'installing golangci-lint $(GOLANGCI_VERSION)'
	@GOBIN=$(TOOLS) $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
$(TOOLS)/protoc-gen-go:
	@GOBIN=$(TOOLS) $(GO) install google.golang.org/protobuf/cmd/protoc-gen-go@$(PROTOC_GEN_GO)

# Pinned by the lock file; no package runs a script of its own. Afterwards they run without a network.
$(APILINT)/installed: hub/api/lint/package-lock.json
	@echo 'installing the linters of the API contracts'
	@mkdir -p $(APILINT) && cp hub/api/lint/package.json hub/api/lint/package-lock.json $(APILINT)
	@cd $(APILINT) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
	@touch $@

.PHONY: clean
clean: ## remove what the build made
	@rm -rf $(BIN)
