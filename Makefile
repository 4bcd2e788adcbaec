# One command each; `make` alone lists them. All run in .venv, built on first use from the pins in
# environment.yml. Another interpreter: PYTHON=python3.12; another environment: VENV="$CONDA_PREFIX".

VENV := .venv
PYTHON := python3.11 python3
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q --progress-bar off --disable-pip-version-check
OLD := sys.version_info < (3, 11)

# Lines of environment.yml as pip requirements; the notebooks' and then the documentation's come last, each
# under a heading of its own.
PINS := sed -n -E -e 's/^ *- *([A-Za-z0-9._-]+==[^ ]+).*/\1/p' -e 's/^ *- *(--extra-index-url .*)/\1/p'
NOTEBOOKS := ^ *\# notebooks
DOCS := ^ *\# documentation
# An older transformers with what it pins, laid over the environment for a second run of its tests.
OLDER := transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2 \
    requests==2.34.2 urllib3==2.8.0 certifi==2026.10.19.post1 charset-normalizer==3.5.3

.PHONY: help demo test test-full test-browser test-slurm test-hf test-models test-slow test-course test-fabric fabric-bench lint \
    notebooks course docs test-docs test-wheel bench clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n -E 's/^([a-z-]+):.*## (.*)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: $(VENV)/.ok ## plan, prove, run and draw a small example: results/demo.json, results/demo.svg
	@mkdir -p results
	$(PY) -m tasp_core demo --out results/demo.json
	$(PY) -m visualize results/demo.json -o results/demo.svg

test: $(VENV)/.ok ## the test suite, two tests at a time (minutes)
	$(PY) -m pytest -n 2 --dist worksteal

test-full: $(VENV)/.ok ## the whole exactness matrix, and the cases that make test leaves out (longer than make test)
	$(PY) -m pytest -m full --timeout 3000

test-browser: $(VENV)/.notebooks-ok ## notebooks in JupyterLab and Chromium (needs Debian's chromium)
	$(PY) -m pytest -m browser tests/browser

test-course: $(VENV)/.notebooks-ok ## run every notebook of the course, the learner's and the solved ones (minutes)
	$(PY) -m pytest -m course tests/test_course.py

test-fabric: $(VENV)/.ok ## real ranks over emulated links, timed (Linux; root or user namespaces)
	$(PY) -m pytest -m fabric tests/test_fabric.py

test-slow: $(VENV)/.ok ## training under torchrun, killed and stopped from outside (minutes)
	$(PY) -m pytest -m slow

test-hf: $(VENV)/.hf-ok ## the Hugging Face tests on an older transformers (minutes)
	PYTHONPATH=$(VENV)/older $(PY) -m pytest -m "models or not models" tests/test_transformers.py tests/test_models.py \
	    tests/test_inputs.py tests/test_trainer.py

test-models: $(VENV)/.ok ## model families of transformers with sequence parallelism against the stock model; docs/models.md (minutes)
	$(PY) -m pytest -m models tests/test_models.py

.PHONY: test-versions
test-versions: $(VENV)/.ok ## oldest and newest dependencies, Python 3.11 to 3.13, from a wheel (minutes; downloads GBs)
	$(PY) -m pytest -m versions tests/test_versions.py

lint: $(VENV)/.ok ## ruff check, ruff format --check, mypy, import layers
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

.PHONY: test-slurm
test-slurm: $(VENV)/.ok ## the jobs of slurm/ on a Slurm cluster on this machine (root, slurm-wlm, munge; minutes)
	$(PY) -m pytest -m slurm tests/test_slurm.py

docs: $(VENV)/.docs-ok ## the documentation as a static site in site/; a broken reference fails
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "open site/index.html; with search: $(PY) -m http.server --directory site"

test-docs: docs ## the built site: every public name is on it, it loads nothing from the network
	$(PY) -m pytest -m docs tests/test_docs.py

test-wheel: $(VENV)/.ok ## the wheel: what is in it, and that it plans in a fresh environment without torch (downloads)
	$(PY) -m pytest -m wheel tests/test_wheel.py

notebooks: $(VENV)/.notebooks-ok ## the course, in Jupyter Lab; its options: LAB="--no-browser --allow-root"
	$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/index.ipynb $(LAB)

course: $(VENV)/.notebooks-ok ## build the course: notebooks, HTML, slides, teacher's kit in notebooks/html (minutes)
	$(PY) -m tasp_course.build --html

bench: $(VENV)/.ok ## CPU time of attention on 4 ranks over that of a plain kernel: results/overhead.json
	@mkdir -p results
	$(PY) -m tasp_core bench overhead --out results/overhead.json

fabric-bench: $(VENV)/.ok ## schedules over emulated links, against bound and prediction (Linux, 20 minutes): results/fabric.json
	@mkdir -p results
	@why=$$($(PY) -c 'from tasp_core.lab.emulation.network import missing; print(missing() and missing(rootless=True))'); \
	if [ -n "$$why" ]; then echo "SKIPPED: $$why"; else \
	    $(PY) -m tasp_core fabric bench --out results/fabric.json && $(PY) -m tasp_core results results; fi

clean: ## remove caches, builds and the demo's files; .venv and other results stay
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis results/demo.json results/demo.svg
	find tasp_core visualize tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ok: environment.yml pyproject.toml
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    for python in $(PYTHON) ''; do \
	        if [ -n "$$python" ] && $$python -c 'import sys; sys.exit($(OLD))' 2>/dev/null; then break; fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "Python 3.11 or newer is needed; tried: $(PYTHON). Name one: make PYTHON=/path/to/python" >&2; exit 1; \
	    fi; \
	    echo "-- $(VENV): $$($$python --version)"; \
	    $$python -m venv $(VENV); \
	fi
	@$(PY) -c 'import sys; sys.exit($(OLD) and "$(VENV) holds a Python older than 3.11: remove it and run make again")'
	@$(PINS) -e '/$(NOTEBOOKS)/q' environment.yml >$(VENV)/pins.txt
	@echo "-- installing $$(grep '^torch==' $(VENV)/pins.txt) (the large one: up to several minutes)"
	@$(PIP) -c $(VENV)/pins.txt torch
	@echo "-- installing the other $$(grep -c == $(VENV)/pins.txt) pins of environment.yml"
	@$(PIP) -r $(VENV)/pins.txt
	@echo "-- installing tasp_core and visualize from here (editable)"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.hf-ok: $(VENV)/.ok Makefile
	@echo "-- installing $(firstword $(OLDER)) beside the environment's"
	@$(PIP) --target $(VENV)/older --upgrade --no-deps $(OLDER)
	@touch $@

$(VENV)/.notebooks-ok: $(VENV)/.ok
	@sed -e '1,/$(NOTEBOOKS)/d' -e '/$(DOCS)/,$$d' environment.yml | $(PINS) >$(VENV)/notebooks.txt
	@echo "-- installing for the notebooks: $$(tr '\n' ' ' <$(VENV)/notebooks.txt)"
	@$(PIP) -c $(VENV)/pins.txt -r $(VENV)/notebooks.txt
	@touch $@

$(VENV)/.docs-ok: $(VENV)/.ok
	@sed -e '1,/$(DOCS)/d' environment.yml | $(PINS) >$(VENV)/docs.txt
	@echo "-- installing for the documentation: $$(tr '\n' ' ' <$(VENV)/docs.txt)"
	@$(PIP) -c $(VENV)/pins.txt -r $(VENV)/docs.txt
	@touch $@
