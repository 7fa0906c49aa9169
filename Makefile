# Two commands matter: `make demo` and `make test`. Everything they need is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2
# One thread per worker: more threads than cores make everything many times slower.
TEST   := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
PIP    := $(BIN)/python -m pip --disable-pip-version-check

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-all lint assets clean

demo: $(STAMP)
	$(BIN)/dpmerge assets fetch minilm-l6 trec6 movie product editorial tweet sms
	$(BIN)/dpmerge simulate examples/five-organisations.toml --out runs/demo --overwrite

test: $(STAMP) lint assets
	$(TEST)

test-all: $(STAMP) lint assets
	$(TEST) -m "not gpu"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

assets: $(STAMP)
	$(BIN)/dpmerge assets fetch minilm-l6 minilm-l3 trec6 movie product editorial tweet sms

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
	  || { echo "dpmerge needs Python 3.11 to 3.14; set PYTHON=python3.12, say" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[simulation,datasets,test]'
	@touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info
