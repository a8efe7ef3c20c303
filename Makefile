# make train    train the default config on Shakespeare and print a sample (ARGS="--residual=s2hc" sets keys)
# make test     all tests        make check    the longer grids       both install into .venv what they need

PYTHON ?= python3
ARGS ?=
RUN := .venv/bin/python

train: .venv/installed data/shakespeare_char/meta.json
	$(RUN) train.py config/default.py $(ARGS)
	$(RUN) sample.py --num_samples=1 $(or $(filter --out_dir=%,$(ARGS)),--out_dir=out)

test: .venv/installed-tests
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2

check: .venv/installed-tests
	$(RUN) -m ruff check .
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 -m slow

data/shakespeare_char/meta.json: .venv/installed
	$(RUN) data/shakespeare_char/prepare.py

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --requirement requirements.txt
	touch $@

.venv/installed-tests: .venv/installed requirements-test.txt
	.venv/bin/pip install --quiet --requirement requirements-test.txt
	touch $@

.PHONY: train test check
