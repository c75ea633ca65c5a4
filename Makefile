# Every target works on a bare machine with Python 3.11, make and gcc: the first one that needs it
# creates .venv and installs the project (about 9 GB, SGLang and torch included).
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
ARGS   ?=
MAKEFLAGS += --no-print-directory

.PHONY: serve doctor test check lint types integration soak kernels gpu sanitize bench format clean
.DEFAULT_GOAL := check

serve: $(READY)        ## OpenAI-compatible server on 127.0.0.1:30000; ARGS="--model PATH --port N"
	$(BIN)/hs-runtime serve $(ARGS)

doctor: $(READY)       ## what this machine can serve, and what would stop it
	$(BIN)/hs-runtime doctor $(ARGS)

test: lint types       ## everything that needs no GPU; pytest's summary closes the output
	@$(BIN)/pytest $(ARGS)

check: lint types      ## the quick part: SGLang is not imported
	@$(BIN)/pytest tests/unit tests/property -m "not integration" $(ARGS)

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .

types: $(READY)
	$(BIN)/mypy

integration: $(READY)  ## a tiny model in a real SGLang process, over HTTP
	$(BIN)/pytest tests/integration $(ARGS)

soak: $(READY)         ## a random mix with known answers in between; ARGS="--seconds 1800"
	$(BIN)/python -m tests.soak.soak $(ARGS)

kernels: $(READY)      ## every kernel for every target (sm_80, 86, 89, 90a), into build/kernels
	cd kernels && $(abspath $(BIN)/python) -m hs_kernels.build

gpu: $(READY)          ## kernels against the reference; needs a CUDA device
	$(BIN)/pytest tests/gpu $(ARGS)

sanitize: $(READY)     ## the same under compute-sanitizer, which comes with the CUDA toolkit
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/pytest tests/gpu \
		--ignore tests/gpu/test_engine.py -k "not 128k and not errors_are" $(ARGS)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/pytest \
		tests/gpu/test_decode.py tests/gpu/test_compress.py -k "one_block or both_sides" $(ARGS)

bench: $(READY)        ## one JSON line per case; ARGS="--op decode --preset max"
	$(BIN)/python tests/bench/bench.py $(ARGS)

format: $(READY)
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

clean:                 ## removes what the targets above made, the environment included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the project and its dependencies into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off -e '.[dev]'
	@touch $@
