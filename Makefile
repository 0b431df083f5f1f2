# Every target sets up what it needs in .venv; running one again is quick.
#
#   PYTHON=python3.12   the interpreter to make .venv with (3.11 or later)
#   PIP_ARGS=...        more arguments for every pip install
#   JOBS=2              test processes
#   CPU=host            the CPU that `make demo` compiles for

ifndef PYTHON
PYTHON := $(firstword $(foreach p,python3 python3.11 python3.12 python3.13 python3.14,$(if \
	$(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))) python3)
endif
PIP_ARGS ?=
JOBS ?= 2
CPU ?= host

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install $(PIP_ARGS) --quiet -c constraints.txt

# The model of the demo, if it is there: one test reads it.
MODEL = $(wildcard build/demo/*.gguf)

# What runs programs for aarch64 on other machines, and where its tools are unpacked to.
QEMU ?= qemu-aarch64-static
AARCH64_LIBRARIES ?= /usr/aarch64-linux-gnu
AARCH64 := build/aarch64

# Nothing here fetches models or code from a model hub.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-aarch64 check-gpu lint bench clean

help: ## This list.
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.installed ## Compile a real model for this CPU, generate text, measure (a few minutes).
	@$(BIN)/python demo/fetch_model.py
	@$(BIN)/python demo/run.py --cpu $(CPU)

test: lint $(VENV)/.gpu ## Linters, types and all tests.
	$(if $(MODEL),HALFBYTE_GGUF=$(MODEL)) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-aarch64: $(VENV)/.installed $(AARCH64)/.fetched ## The aarch64 kernels, by qemu-user (Debian: qemu-user-static, libstdc++6-arm64-cross).
	@command -v $(QEMU) >/dev/null && test -d $(AARCH64_LIBRARIES) || { \
		echo "set QEMU and AARCH64_LIBRARIES, or on Debian: apt-get install qemu-user-static libstdc++6-arm64-cross" >&2; exit 1; }
	HALFBYTE_AARCH64="$(QEMU) -cpu max -L $(AARCH64_LIBRARIES) $(abspath $(AARCH64))/iree/_runtime_libs/iree-run-module" \
		$(BIN)/python -m pytest -n $(JOBS) tests/lowering -k aarch64

# What GPU programs are tested with: a Vulkan driver that needs no GPU, and NVIDIA's assembler. Tests skip without them.
$(VENV)/.gpu: $(VENV)/.installed
	@if ! ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json >/dev/null 2>&1; then \
		if [ "`id -u`" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing Mesa's software Vulkan driver (for tests alone)"; \
			{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
				mesa-vulkan-drivers libvulkan1 >/dev/null; } || echo "no Vulkan driver: those tests are skipped" >&2; \
		else \
			echo "no Vulkan driver: tests of Vulkan are skipped (Debian: apt-get install mesa-vulkan-drivers libvulkan1)" >&2; \
		fi; \
	fi
	@$(PIP) --no-deps nvidia-cuda-nvcc || echo "no ptxas: tests that assemble CUDA programs are skipped" >&2
	@touch $@

check-gpu: $(VENV)/.installed ## Tests and speed on this machine's GPUs, into build/gpu-report.txt (Vulkan by lavapipe where there is none).
	-@$(BIN)/python demo/fetch_model.py
	@$(BIN)/python benchmarks/gpu_report.py --jobs $(JOBS)

lint: $(VENV)/.installed ## Linters and types alone.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.benchmark ## int4 linears against ONNX Runtime, the table of the README.
	$(BIN)/python benchmarks/linear.py --shapes 4096x4096 --group 128 --m 1,16,256 --threads 1 --peers ort --json build/linear.json

setup: $(VENV)/.installed ## The environment alone.

clean: ## Remove the environment and everything built.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or later, or set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "halfbyte needs Python 3.11 or later, $(PYTHON) is `$(PYTHON) -V 2>&1`: set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make environments: install its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "making $(VENV) with `$(PYTHON) -V`"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch by itself and first: with PIP_ARGS it can come from an index of CPU builds.
$(VENV)/.torch: $(VENV)/.made constraints.txt
	@echo "installing torch (hundreds of megabytes)"
	@$(PIP) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing halfbyte and what it needs (hundreds of megabytes)"
	@$(PIP) -e '.[compile,text,test]'
	@touch $@

# IREE's own tools for aarch64, out of the wheel.
$(AARCH64)/.fetched: $(VENV)/.installed
	@rm -rf $(AARCH64) && mkdir -p $(AARCH64)
	@$(BIN)/python -m pip download $(PIP_ARGS) --quiet -c constraints.txt --no-deps --only-binary=:all: \
		--platform manylinux_2_28_aarch64 --dest $(AARCH64) iree-base-runtime
	@$(BIN)/python -m zipfile -e $(AARCH64)/*.whl $(AARCH64) && chmod +x $(AARCH64)/iree/_runtime_libs/iree-run-module
	@touch $@

$(VENV)/.benchmark: $(VENV)/.installed
	@echo "installing the peers to compare with"
	@$(PIP) -e '.[benchmark]'
	@mkdir -p build
	@touch $@
