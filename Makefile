# Every target makes .venv by itself; the first run installs, later ones start at once.
#
#   make demo    compare the methods on the bundled model, write the report under out/demo
#   make test    run the tests
#   make lint    run the linters, the type checker and the import contracts
#   make docs    build the documentation into site/
#   make clean   remove what these targets made
#
# PyPI's torch for Linux carries CUDA. To install PyTorch's CPU wheels instead, point TORCH_ARGS at
# PyTorch's CPU wheel index:  make demo TORCH_ARGS="--index-url <PyTorch's CPU wheel index>"

PYTHON      ?= python3
TORCH_ARGS  ?=
PYTEST_ARGS ?= -n 2

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/stamps

.PHONY: demo test lint docs clean
.DELETE_ON_ERROR:

demo: $(STAMP)/demo
	$(BIN)/gossamer compare --demo --out out/demo

test: $(STAMP)/dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python tools/make_readme_results.py --check
	$(BIN)/python tools/make_results_page.py --check

docs: $(STAMP)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) out/demo site .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# torch goes first and alone: with the CPU build in place, no later step replaces it.
$(STAMP)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Gossamer needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	  echo "Could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PIP) install $(TORCH_ARGS) -c constraints.txt torch==2.13.0
	@mkdir -p $(STAMP) && touch $@

define install
$(PIP) install -q -c constraints.txt -e ".[$(1)]"
@touch $@
endef

$(STAMP)/demo: $(STAMP)/torch pyproject.toml
	$(call install,diffusers$(comma)report$(comma)eval)

$(STAMP)/dev: $(STAMP)/torch pyproject.toml
	$(call install,all$(comma)dev)

$(STAMP)/docs: $(STAMP)/torch pyproject.toml
	$(call install,docs)

comma := ,
