# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what is missing and reuses what is there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test quick check format bench bench-others sanitize clean

demo: $(READY)
	$(BIN)/daypack compare --optimizers adamw,gefen --out runs --name demo

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# For while one writes, under a minute: formats, calibration, rules, optimizers, one case of each conformance scenario.
quick: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --quick

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/step.py

# The same beside torchao's and bitsandbytes' 8-bit optimizers. The constraint keeps them from pulling another torch.
bench-others: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torchao bitsandbytes
	$(BIN)/python benchmarks/step.py

# The native kernels and their tests under the address and undefined-behaviour sanitizers. CI runs a part of the tests.
SANITIZED ?= tests/kernels
SANITIZE := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
sanitize: $(READY)
	DAYPACK_CXXFLAGS="$(SANITIZE)" $(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize/objects
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 DAYPACK_NATIVE=build/sanitize/daypack/kernels/_native.so \
	  $(BIN)/python -m pytest -q -n 2 $(SANITIZED)

# torch goes in first and alone: the constraint keeps every later package from pulling another build of it.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
