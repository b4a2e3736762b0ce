# Each target works on a fresh machine: it makes .venv and installs what it needs, and a second run installs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

# Tests and demos start many processes. One that may not read and keep bytecode compiles torch each time: seconds, of each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-long test-portable test-peers lint docs bench release-check clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-15s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## an arm learns a task from images, with demonstrations and take-overs; ARGS=--fast for a minute's worth
	@$(BIN)/hilt doctor --fix --quiet || true
	@$(BIN)/hilt demo $(ARGS)

test: $(VENV)/.installed  ## every test, lint and types among them; ARGS="tests/replay -x" for a part
	@$(BIN)/hilt doctor --fix --quiet || true
	@$(PYTHON) tools/browser.py
	$(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)  # four on two cores: many tests wait for a process

test-fast: $(VENV)/.installed  ## the quick files only, under two minutes: for the inner loop
	$(BIN)/python -m pytest -n 3 --dist worksteal --fast $(ARGS)

test-long: $(VENV)/.installed  ## before a release: what `make test` shortens at full length, and a soak of an hour
	@$(BIN)/hilt doctor --fix --quiet || true
	@$(PYTHON) tools/browser.py
	$(BIN)/python -m pytest -n 3 --dist worksteal --long $(ARGS)

test-portable: $(VENV)/.installed  ## the tests of replay, wire, runtime and robot in the forms that macOS runs; ARGS="tests/wire -x" for a part
	HILT_PORTABLE=1 $(BIN)/python -m pytest -n 3 --dist worksteal $(or $(ARGS),tests/replay tests/wire tests/hil tests/vla tests/runs tests/distributed tests/recording tests/envs tests/robot)

# dm-reverb has wheels for Linux on x86-64 and Python up to 3.11, and for nothing else: elsewhere what needs it is skipped.
REVERB := $(shell $(PYTHON) -c 'import platform, sys; print("here" * (sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 12)))')

test-peers: $(VENV)/.installed-peers $(if $(REVERB),$(VENV)-reverb/.installed) $(VENV)-lerobot/.installed $(VENV)-lerobot21/.installed $(VENV)-hdf5/.installed $(VENV)-sinks/.installed $(VENV)-openpi/.installed $(VENV)-libero/.installed  ## the tests that run other people's programs beside ours
	$(BIN)/python -m pytest -m peers $(ARGS)
	$(if $(REVERB),$(VENV)-reverb/bin/python -m pytest -m peers tests/peers/test_reverb.py tests/peers/test_rlds.py tests/seeds/test_001_rlds_to_reverb.py,@echo "SKIPPED tests/peers/test_reverb.py, tests/peers/test_rlds.py: dm-reverb has wheels only for Linux on x86-64 and Python up to 3.11")
	$(VENV)-lerobot/bin/python -m pytest -m peers tests/peers/test_lerobot.py
	$(VENV)-lerobot21/bin/python -m pytest -m peers tests/peers/test_lerobot.py
	$(VENV)-hdf5/bin/python -m pytest -m peers tests/peers/test_hdf5.py
	$(VENV)-sinks/bin/python -m pytest -m peers tests/peers/test_sinks.py
	$(VENV)-libero/bin/python -m pytest -m peers tests/peers/test_libero.py tests/peers/test_ript.py tests/peers/test_metaworld.py

docs: $(VENV)/.installed-docs  ## the documentation as a site, in site/; ARGS=serve also serves it on this machine
	$(BIN)/python tools/build_site.py $(ARGS)

lint: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-peers $(if $(REVERB),$(if $(filter wire formats,$(ARGS)),$(VENV)-reverb/.installed)) $(if $(filter rollout,$(ARGS)),$(VENV)-libero/.installed)  ## ours, peers and the machine's limits, as ratios; ARGS="replay --quick", wire, formats, robot, learn, rollout
	$(BIN)/python -m bench $(or $(ARGS),replay)

release-check: $(VENV)/.installed  ## before a release: wheel and sdist, installed and run in clean environments; docs/release.md
	$(BIN)/python tools/release_check.py $(ARGS)

clean:  ## remove .venv, caches and build results
	rm -rf $(VENV) $(VENV)-reverb $(VENV)-lerobot $(VENV)-lerobot21 $(VENV)-hdf5 $(VENV)-sinks $(VENV)-openpi $(VENV)-libero build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(VENV) dev,torch,zstd,formats,array-record,sim,robot,teleop,serve,vla,cluster,tensorboard
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PYTHON) tools/install.py $(VENV) dev,torch,zstd,formats,array-record,sim,robot,teleop,serve,vla,cluster,tensorboard,docs
	@touch $@

# gym-hil comes alone: what it imports is there, and the rest of its dependencies drives its own joysticks.
$(VENV)/.installed-peers: $(VENV)/.installed
	@$(PYTHON) tools/install.py $(VENV) dev,torch,zstd,formats,array-record,sim,robot,teleop,serve,vla,cluster,tensorboard,bench,learn-bench gym-hil==0.1.14
	@touch $@

# TensorFlow's pins would break the main environment.
$(VENV)-reverb/.installed: pyproject.toml tools/install.py
	@$(PYTHON) tools/install.py $(VENV)-reverb reverb
	@touch $@

# LeRobot would bring much that its datasets do not need; the second one is the last that wrote format v2.1.
$(VENV)-lerobot/.installed: LEROBOT = lerobot==0.4.4
$(VENV)-lerobot21/.installed: LEROBOT = lerobot==0.3.3
$(VENV)-lerobot/.installed $(VENV)-lerobot21/.installed: pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(@D) $(patsubst $(VENV)-%,%,$(@D)) $(LEROBOT)
	@touch $@

$(VENV)-hdf5/.installed: pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(@D) hdf5 robomimic==0.3.0
	@touch $@

$(VENV)-sinks/.installed: pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(@D) sinks
	@touch $@

# The client of openpi alone: a server of ours in the main environment answers it.
$(VENV)-openpi/.installed: pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(@D) openpi
	@touch $@

# LIBERO and Meta-World pin what nothing here needs: they come alone. LIBERO's assets are in HILT_LIBERO_ASSETS; without them its tests are skipped with a line.
$(VENV)-libero/.installed: pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(@D) dev,vla,libero,metaworld hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1 metaworld==3.1.1
	@touch $@
