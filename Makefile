# `make help` lists what there is to do. Everything is put into .venv and build.

PYTHON3 ?= python3
# Prints versions and packages from third_party/versions.toml.
THIRD_PARTY := torch_resilient/cli/third_party.py
# The version of torch that is installed and built against. Where its package index
# has several builds, PIP_INDEX_URL and the other variables of pip choose one.
TORCH ?= $(shell $(PYTHON3) $(THIRD_PARTY) default torch)
JOBS ?= 2
ARGS ?=
CASES ?= 100000
HOSTILE ?= 1000
FUZZ_SECONDS ?= 60

VENV := .venv
BIN := $(VENV)/bin

CPP_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')
# What the installed package is made from; Python files are used in place.
BUILT_FROM := setup.py pyproject.toml \
  $(shell find csrc -path csrc/tests -prune -o -type f -print)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export MAX_JOBS ?= $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.PHONY: help setup demo demo-bubbles demo-lossy demo-verbs test lint tidy format cpp-test python-test \
  encrypted-test slow-test verbs-test verbs-slow-test verbs-lab verbs-lab-if-possible test-torch gpu-test test-frameworks asan tsan staging planted nightly fuzz bench options-doc clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

setup: build/installed ## .venv with torch, the tools and this package

$(VENV)/pyvenv.cfg:
	$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON3")'
	$(PYTHON3) -m venv $(VENV)

# torch stands in the same command as everything else, so nothing replaces it.
$(VENV)/tools: $(VENV)/pyvenv.cfg Makefile third_party/versions.toml
	@mkdir -p build
	$(BIN)/python $(THIRD_PARTY) packages run build optional test lint >build/tools.txt
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)" -r build/tools.txt
	@touch $@

# --no-deps: installing this package must never change torch.
build/installed: $(VENV)/tools $(BUILT_FROM)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@mkdir -p build
	@touch $@

demo: setup ## the demonstration: training goes on while the network fails
	$(BIN)/python examples/run_demo.py $(ARGS)

demo-bubbles: setup ## prefills of inference requests in the idle time of a training
	$(BIN)/python examples/prefill_service.py $(ARGS)

demo-lossy: setup ## training over a link that loses packets, in three ways (root)
	$(BIN)/python examples/demo_lossy.py $(ARGS)

demo-verbs: setup verbs-lab ## training over RDMA under a fault every second, in guests (root)
	$(BIN)/python examples/failover.py --verbs $(ARGS)

# The tests of the package mostly wait. Meanwhile, with what they leave of the processors, the core
# is compiled; if that fails, the second line says how.
test: lint setup ## everything that must pass before a commit
	nice -n 19 $(MAKE) -k asan-built tsan-built planted-built \
	  verbs-lab-if-possible >build/ahead.log 2>&1 & ahead=$$!; \
	  $(MAKE) python-test encrypted-test || { status=$$?; kill $$ahead; exit $$status; }; \
	  wait $$ahead || true
	$(MAKE) verbs-test asan tsan staging planted

lint: $(VENV)/tools ## static checks of Python and C++
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run -Werror $(CPP_FILES)
	$(MAKE) -C csrc cuda
	$(MAKE) tidy

tidy: $(VENV)/tools ## names and usual bugs in the C++ core, checked by clang-tidy
	$(MAKE) --no-print-directory -s -C csrc -j$(JOBS) tidy

format: $(VENV)/tools ## rewrite the source in the house style
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP_FILES)

cpp-test: ## tests of the C++ core, ARGS="part of a name"
	$(MAKE) -C csrc -j$(JOBS) all
	$(MAKE) -C csrc JOBS=$(JOBS) test

python-test: setup ## tests of the package, ARGS="-k expression"
	$(BIN)/python -m pytest -m "not slow and not verbs" $(ARGS)

# By itself, nothing is encrypted within a host.
ENCRYPTED := $(patsubst %,tests/test_%.py,call_errors cli_chaos collective_calls collectives \
  dispatch failures frameworks hierarchical p2p torch_pipelining types work) \
  tests/test_encryption.py::test_the_encrypted_run_of_other_tests_encrypts
encrypted-test: setup ## those that send and fail most, again, with all connections encrypted
	RESILIENT_TEST_ENCRYPTION=required \
	  $(BIN)/python -m pytest -m "not slow and not verbs" $(or $(ARGS),$(ENCRYPTED))

slow-test: setup ## the tests that take long or much memory
	$(BIN)/python -m pytest -m "slow and not verbs" $(ARGS)

# Apart from the other tests, which run while the kernel of the guests is built.
verbs-test: setup verbs-lab-if-possible ## tests with real verbs, in guests (root)
	$(BIN)/python -m pytest -m "verbs and not slow" $(ARGS)

verbs-slow-test: setup verbs-lab ## 200 fault points over real verbs, in guests (root)
	$(BIN)/python -m pytest -m "verbs and slow" $(ARGS)

# Some minutes once; the kernel is kept until its configuration or its source changes.
verbs-lab: setup ## the kernel of the verbs lab's guests, and a program for its tests
	nice -n 10 $(BIN)/python torch_resilient/testing/guest_kernel.py --jobs $(JOBS)
	$(MAKE) -C csrc verbs-probe

verbs-lab-if-possible: setup
	nice -n 10 $(BIN)/python torch_resilient/testing/guest_kernel.py --jobs $(JOBS) --if-possible
	$(MAKE) -C csrc verbs-probe

# A copy of the source has its own environment, so neither torch nor the extension of this one
# changes. A second run compiles what has changed.
TRIAL = build/$(notdir $(PYTHON3))-torch-$(TORCH)
test-torch: ## tests of the package with TORCH=2.15.0, or PYTHON3=python3.13, in an environment apart
	mkdir -p $(TRIAL)
	find $(TRIAL) -mindepth 1 -maxdepth 1 ! -name build ! -name $(VENV) -exec rm -rf {} +
	rm -f $(TRIAL)/build/installed
	tar -c --exclude=./build --exclude=./$(VENV) --exclude=./.git --exclude='.*_cache' \
	  --exclude=__pycache__ --exclude='*.so' --exclude=_build_info.py . | tar -x -C $(TRIAL)
	$(MAKE) -C $(TRIAL) python-test TORCH=$(TORCH)

# The environment has the torch that TORCH and the variables of pip chose when it was made.
gpu-test: setup ## checks and measurements on a GPU, ARGS="--only SECTION", ARGS=--help
	$(BIN)/python tests/gpu_check $(ARGS)

# An environment on top of .venv: the same torch, and what the frameworks need.
build/frameworks/tools: build/installed Makefile third_party/versions.toml
	$(BIN)/python -m venv --clear build/frameworks
	build/frameworks/bin/python -c 'import sys, sysconfig; \
	  own = sysconfig.get_path("purelib"); \
	  print("import site; site.addsitedir(%r)" % sys.argv[1], file=open(own + "/base.pth", "w"))' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(BIN)/python -c 'import torch; print("torch==" + torch.__version__)' >build/frameworks/torch.txt
	$(BIN)/python $(THIRD_PARTY) packages framework >build/frameworks/packages.txt
	build/frameworks/bin/python -m pip install --quiet --constraint build/frameworks/torch.txt \
	  -r build/frameworks/packages.txt
	@touch $@

test-frameworks: build/frameworks/tools ## tests with Lightning, torchft and so on, ARGS="-k expression"
	RESILIENT_TEST_FRAMEWORKS=required build/frameworks/bin/python -m pytest \
	  tests/test_frameworks.py tests/test_torchft.py $(ARGS)

asan: asan-built ## tests of the C++ core under the address and undefined sanitizers
	$(MAKE) -C csrc VARIANT=asan JOBS=$(JOBS) test

tsan: tsan-built ## tests of the C++ core under the thread sanitizer
	$(MAKE) -C csrc VARIANT=tsan JOBS=$(JOBS) test

staging: asan-built tsan-built ## tests of device staging with torch, under both sanitizers
	$(MAKE) -C csrc VARIANT=asan staging
	$(MAKE) -C csrc VARIANT=tsan staging

planted: planted-built ## simulations, and mistakes on purpose, each of which they must find
	$(MAKE) -C csrc VARIANT=planted JOBS=$(JOBS) test

%-built:
	$(MAKE) -C csrc -j$(JOBS) VARIANT=$* all $(if $(filter asan tsan,$*),staging-tests)

nightly: ## CASES=100000 random networks for each simulation, and HOSTILE=1000 hostile members
	$(MAKE) -C csrc -j$(JOBS) all
	RESILIENT_SIM_SCHEDULES=$(CASES) RESILIENT_TEST_CASES=$(CASES) \
	  $(MAKE) -C csrc test ARGS="$(or $(ARGS),simulation)"
	$(MAKE) -C csrc -j$(JOBS) VARIANT=asan all
	RESILIENT_TEST_CASES=$(HOSTILE) $(MAKE) -C csrc VARIANT=asan test ARGS=AHostileMember

fuzz: ## each fuzzer for FUZZ_SECONDS=60; needs clang
	$(MAKE) -C csrc VARIANT=fuzz CXX=clang++ -j$(JOBS) fuzzers
	$(MAKE) -C csrc VARIANT=fuzz FUZZ_SECONDS=$(FUZZ_SECONDS) fuzz

bench: setup ## measurements; ARGS="--record NAME.py" keeps them in docs/measurements.md
	$(BIN)/python benchmarks/run.py $(ARGS)

options-doc: setup ## write docs/options.md anew from csrc/base/options.def
	$(BIN)/python -m torch_resilient.options --markdown > build/options.md
	mv build/options.md docs/options.md

clean: ## remove everything that was built; .venv stays
	rm -rf build dist *.egg-info __pycache__ .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f torch_resilient/_build_info.py torch_resilient/*.so
	find torch_resilient tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
