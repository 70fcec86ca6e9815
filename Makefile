# Everything sets itself up: a virtual environment in .venv, for the tests real agents in .agents and a model in .models.
#   make serve ARGS="--upstream URL"    make test ARGS="-k chat"    make eval BASE_URL=URL LLM=NAME

PYTHON ?= python3
ARGS ?=
ATTENTION ?= 1
MODEL_PORT ?= 8090
VENV := .venv
BIN := $(VENV)/bin
EVAL := $(BIN)/recap eval
SESSIONS := $(sort $(wildcard tests/data/sessions/*.jsonl))
SMALL := $(or $(TEST_MODELS_DIR),.models)/SmolLM2-135M-Instruct
TYPED := -p tests.fakes -p tests.agents -p tests.meta -p tests.simulation -p tests.properties -p tests.load -p scripts.load

.PHONY: serve test agents browser attention models bench bench-peers bench-attention load eval eval-attention eval-small eval-served eval-provider lint format types check audit fuzz clean

serve: $(VENV)/.installed attention
	@$(if $(filter 0,$(ATTENTION)),RECAP_ATTENTION=off) $(BIN)/recap serve $(ARGS)

test: $(VENV)/.installed-dev agents models browser
	$(BIN)/pytest $(ARGS)

bench: $(VENV)/.installed-dev
	$(BIN)/python scripts/bench_selection.py
	$(BIN)/python scripts/bench_proxy.py
	$(BIN)/python scripts/bench_inspector.py

# Beside other proxies, each from PyPI in an environment of its own in .peers. Some eight minutes; run it again to go on.
bench-peers: $(VENV)/.installed-dev
	$(BIN)/python scripts/bench_peers.py --into docs/benchmarks.md $(ARGS)

bench-attention: $(VENV)/.installed-attention
	$(BIN)/python scripts/bench_attention.py $(ARGS)

# 200 sessions at once and every byte of them checked, then 32 beside readers and removals. A quarter of an hour.
load: $(VENV)/.installed-dev
	$(BIN)/python -m scripts.load $(ARGS)

# Every study on the sessions of the tests, into eval/ (run it again to go on), then the measured parts of
# docs/evaluation.md. What asks a model asks the small one, behind MODEL_PORT; with BASE_URL and LLM, and the key in
# OPENAI_API_KEY, that one as well.
eval: $(VENV)/.installed-dev models
	$(EVAL) reuse $(SESSIONS) >/dev/null
	$(EVAL) simulate $(SESSIONS) >/dev/null
	$(EVAL) modes $(SESSIONS) >/dev/null
	$(EVAL) compaction $(SESSIONS) >/dev/null
	@if [ -d $(SMALL) ]; then $(MAKE) --no-print-directory eval-attention eval-small; \
	    else echo "make: there is no small model: what needs it is not measured"; fi
	$(if $(BASE_URL),@$(MAKE) --no-print-directory eval-provider LLM='$(or $(LLM),$(error BASE_URL needs LLM=NAME))')
	$(EVAL) report --into docs/evaluation.md

eval-attention: $(VENV)/.installed-dev
	$(EVAL) reuse $(SESSIONS) --model $(SMALL) --tokens-max 8192 --out eval/attention >/dev/null
	$(EVAL) concentration $(SESSIONS) --model $(SMALL) --tokens-max 8192 >/dev/null
	$(EVAL) queries $(SESSIONS) --model $(SMALL) --tokens-max 8192 >/dev/null
	$(EVAL) costs $(SESSIONS) --model $(SMALL) >/dev/null

# The small model in a provider's place: it can hardly program, and shows the path alone. The differential test is
# not for it: it reads 8,192 tokens, and the made history has 18,000.
eval-small: $(VENV)/.installed-dev
	$(BIN)/python scripts/serve_model.py $(SMALL) --port $(MODEL_PORT) -- $(MAKE) --no-print-directory eval-served

LOCAL = --base-url http://127.0.0.1:$(MODEL_PORT)/v1 --model $(notdir $(SMALL)) --out eval/small
eval-served: $(VENV)/.installed-dev
	$(EVAL) lic $(LOCAL) --selectors full,recap,user-messages,summary,kv-eviction --kv-model $(SMALL) \
	    --instances 3 --conversations 1 --max-tokens 96 --parallel 1 >/dev/null

PROVIDER = --base-url '$(BASE_URL)' --model '$(LLM)' --out eval/provider
eval-provider: $(VENV)/.installed-dev
	$(EVAL) lic $(PROVIDER) $(ARGS) >/dev/null
	$(EVAL) compaction $(SESSIONS) --family differential $(PROVIDER) >/dev/null

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases $(TYPED)

check: lint types test

# What is installed for serving, into .audit/sbom.json, and what is known against it. The tools have a place of their own.
audit: $(VENV)/.installed attention .audit/.installed
	.audit/bin/python scripts/audit.py $(VENV)/lib/python*/site-packages --sbom .audit/sbom.json $(ARGS)

.audit/.installed: | $(VENV)/bin/python
	$(BIN)/python -m venv .audit
	.audit/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
	@touch $@

# For an hour or a night: FUZZ_EXAMPLES of each kind (20,000), ARGS="-k encoding" a part of them.
fuzz: $(VENV)/.installed-dev
	$(BIN)/pytest tests/fuzz tests/inspector/test_openapi.py --hypothesis-profile=fuzz $(ARGS)

# Real agents are a matter of the tests alone: without npm, or when it fails, those tests are skipped.
agents:
	@if ! command -v npm >/dev/null; then \
	    echo "make: npm is not installed: the tests with real agents (OpenCode, Codex, Qwen Code) will be skipped"; \
	elif ! $(MAKE) --silent .agents/.installed; then \
	    echo "make: npm could not fetch the agents: tests with those that are absent will be skipped"; \
	fi

.agents/.installed: tests/agents/package.json
	@mkdir -p .agents
	@cp $< .agents/
	@echo "make: fetching the pinned agents into .agents"
	npm install --prefix .agents --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# The inspector's tests drive the machine's own Chromium: without one they are skipped.
browser: $(VENV)/.installed-dev
	@$(BIN)/python -c 'from tests import browser; why = browser.why_absent(); \
	    why and print("make: tests in a browser will be skipped:", why)'

# Libraries of the local model: large. Where they cannot be had the proxy works without, and says so.
attention: $(VENV)/.installed
	@if [ "$(ATTENTION)" = 0 ]; then \
	    echo "make: ATTENTION=0: no local model"; \
	elif ! $(MAKE) --silent $(VENV)/.installed-attention; then \
	    echo "make: torch and transformers could not be installed: attention will be off"; \
	fi

# A small model for the tests; TEST_MODELS_DIR names a folder that has it already.
models: $(VENV)/.installed-dev attention
	@if [ "$(ATTENTION)" != 0 ] && [ -z "$$TEST_MODELS_DIR" ] && [ -e $(VENV)/.installed-attention ]; then \
	    $(MAKE) --silent .models/.installed || \
	        echo "make: the small model could not be fetched: tests with real weights will be skipped"; \
	fi

.models/.installed: scripts/fetch_models.py
	@echo "make: fetching a small model into .models"
	$(BIN)/python scripts/fetch_models.py .models
	@touch $@

$(VENV)/.installed-attention: pyproject.toml | $(VENV)/bin/python
	@echo "make: installing torch and transformers"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[attention]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: Python 3.11 or newer is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "make: $(PYTHON) cannot make virtual environments (on Debian: apt install python3-venv)" >&2; exit 1; }

clean:
	rm -rf $(VENV) .agents .audit .models .peers build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
