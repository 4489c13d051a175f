# Every check that runs in CI is a target here.
CARGO ?= cargo
TRACES ?=
SEED ?= 1
TARGET ?= open
SECONDS ?= 3600
MEMORYVIZ_JS ?=
PYTHON ?= python3
TORCH ?=
ARGS ?=
PYTHON_CODE = examples python scripts tests
PREFIX ?= /usr/local
DESTDIR ?=
CUSHION = $(or $(CARGO_TARGET_DIR),target)/release/cushion
# The build flags of what tests use.
TESTED = --profile test --workspace --features cushion/cudarc --locked
# What is built with these flags. `make test` adds the tests: with them, dependencies have the same features as in
# `cargo test`, and nothing is built twice.
TESTED_TARGETS = --lib --bin cushion
TESTED_IN = $(or $(CARGO_TARGET_DIR),target)/debug

.PHONY: help test test-viz demo picture bench docs verify fuzz clean \
	test-python test-wheel test-capi wheel install-c gpu-kit test-gpu bench-gpu

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

test: ## check format, lints and docs, and run every test that needs no GPU (SEED=N for other random cases)
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --workspace --all-targets --features cushion/cudarc --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --features cushion/cudarc --locked --quiet
	@sh scripts/setup-browser.sh
	PROPTEST_RNG_SEED=$(SEED) $(CARGO) test --workspace --features cushion/cudarc --locked
	@echo 'the examples in Rust that need no GPU:'
	@for example in buffers shortages; do \
		said=$$($(TESTED_IN)/examples/$$example) && echo "$$said" \
			&& test "$$(echo "$$said" | tail -n 1)" = ok || exit 1; \
	done
	@$(MAKE) --no-print-directory test-viz test-capi test-python test-wheel TESTED_TARGETS='--lib --bins --tests'

test-viz: ## test converted snapshots with PyTorch's tools (MEMORYVIZ_JS=PATH adds its viewer)
	@$(CARGO) build $(TESTED) --quiet $(TESTED_TARGETS)
	@sh scripts/test-viz.sh $(TESTED_IN)/cushion "$(MEMORYVIZ_JS)"

test-capi: ## test the library for C and C++ with programs in both, on simulated devices (CC, CXX)
	@$(CARGO) build $(TESTED) --quiet $(TESTED_TARGETS)
	@CC="$(CC)" CXX="$(CXX)" sh scripts/test-capi.sh

install-c: ## install cushion.h, the libraries for C and C++ and cushion.pc in PREFIX (/usr/local) below DESTDIR
	@$(CARGO) build --release --locked --quiet -p cushion-capi
	@DESTDIR="$(DESTDIR)" sh scripts/install-c.sh "$(PREFIX)" "$(or $(CARGO_TARGET_DIR),target)/release"

test-python: ## test the Python package over stand-ins for CUDA (TORCH=2.11.0 installs that PyTorch, 5 GB, to run all tests)
	@tools=$$(PYTHON="$(PYTHON)" sh scripts/python.sh ruff mypy) && "$$tools/ruff" check --quiet $(PYTHON_CODE) \
		&& "$$tools/ruff" format --quiet --check $(PYTHON_CODE) && "$$tools/mypy"
	@$(PYTHON) -m unittest discover -s tests/gpu -p 'test_*.py'
	@$(CARGO) build $(TESTED) --quiet $(TESTED_TARGETS)
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh scripts/test-python.sh

test-wheel: ## test pip install . and pip install -e ., from outside the repository
	@PYTHON="$(PYTHON)" sh scripts/test-wheel.sh

wheel: ## build the wheel to release in target/wheels, for every Linux with glibc 2.17 or later
	@PYTHON="$(PYTHON)" sh scripts/wheel.sh $(or $(CARGO_TARGET_DIR),target)/wheels

gpu-kit: ## build gpu-kit/: what a machine with a GPU but without Rust needs in addition to this repository
	@CARGO="$(CARGO)" PYTHON="$(PYTHON)" sh scripts/gpu-kit.sh

test-gpu: ## test Cushion in PyTorch on a GPU (ARGS="--group NAME ..."; see tests/gpu/README.md)
	@CARGO="$(CARGO)" PYTHON="$(PYTHON)" sh scripts/gpu.sh test $(ARGS)

bench-gpu: ## measure Cushion against PyTorch's own allocator on a GPU (ARGS="--group NAME ...")
	@CARGO="$(CARGO)" PYTHON="$(PYTHON)" sh scripts/gpu.sh bench $(ARGS)

demo: ## replay recorded runs on simulated cards that are too small, under each policy, and write a report
	@$(CARGO) build --release --locked --quiet --bin cushion
	@sh scripts/demo.sh $(CUSHION) demo-out

picture: demo ## make the README's picture from the demo's report (needs Chromium)
	@sh scripts/picture.sh demo-out/llama_varlen.html docs/images/report.png

bench: ## measure the engine, also with many blocks, streams and pages, replay (TRACES=FOLDER for other traces) and loading
	@$(CARGO) bench --locked --quiet -p cushion-core --bench engine
	@$(CARGO) bench --locked --quiet -p cushion-core --bench growth
	@$(CARGO) bench --locked --quiet -p cushion-core --bench misses
	@TRACES="$(TRACES)" $(CARGO) bench --locked --quiet -p cushion-trace --bench replay
	@$(CARGO) bench --locked --quiet -p cushion-trace --bench load

verify: ## compare the engine with PyTorch's recorded addresses, on all traces in tests/traces
	@$(CARGO) build --release --locked --quiet --bin cushion
	@sh scripts/verify.sh $(CUSHION)

# cargo-fuzz needs coverage flags that a stable compiler accepts only with RUSTC_BOOTSTRAP.
fuzz: ## run one fuzz target for an hour (TARGET=pickle, json, rmm, own, open, receipts or engine; SECONDS=3600)
	@$(CARGO) fuzz --version >/dev/null 2>&1 || { echo 'make fuzz needs cargo-fuzz: cargo install cargo-fuzz' >&2; exit 1; }
	@mkdir -p fuzz/work/$(TARGET)
	cd fuzz && RUSTC_BOOTSTRAP=1 $(CARGO) fuzz run --fuzz-dir . --sanitizer none $(TARGET) \
		work/$(TARGET) corpus/$(TARGET) -- -dict=words.dict -max_total_time=$(SECONDS) \
		-rss_limit_mb=2048 -timeout=20 -print_final_stats=1

docs: ## regenerate docs/options.md
	$(CARGO) run --release --locked --quiet --bin cushion -- options > docs/options.md

clean:
	$(CARGO) clean
