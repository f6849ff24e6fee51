PYTHON ?= python3
STAMP := .venv/stamp
INTEGRATIONS_STAMP := .venv-integrations/stamp
TORCHTITAN_STAMP := .venv-torchtitan/stamp
SIMULATED_TORCH := 2.13.0
SIMULATED_STAMP := .venv-simulated-gpu/stamp-$(SIMULATED_TORCH)
TORCH := torch>=2.9,<2.14
LIGER := liger-kernel==0.8.5 triton==3.9.0
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

.PHONY: test check suite fast demo docs reference pictures bench gpu simulated-gpu integrations plans starts slurm cable exhaustive format clean

test: check suite

# Lint and types.
check: $(STAMP)
	$(IN_VENV) scripts/check

suite: $(STAMP)
	$(IN_VENV) scripts/test

# After each edit: tests that start no processes.
fast: $(STAMP)
	$(IN_VENV) scripts/test -m "not processes and not slow and not exhaustive and not simulated_gpu and not integrations"

demo: $(STAMP)
	$(IN_VENV) scripts/demo

# The pages of docs/ and all they link to, as a site in site/.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build

# The parts of docs/reference.md that are generated from the settings and the parsers.
reference: $(STAMP)
	.venv/bin/python -m scripts.reference

# The report's pictures in docs/images, from a run on the CPU.
pictures: $(STAMP)
	$(IN_VENV) scripts/pictures

bench: $(STAMP) $(INTEGRATIONS_STAMP)
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.search_accuracy
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.loop
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.forecast_accuracy
	OMP_NUM_THREADS=1 .venv-integrations/bin/python -m benchmarks.loop_accuracy
	OMP_NUM_THREADS=1 .venv-integrations/bin/python -m benchmarks.hugging_face_points
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.allocator_events
	.venv/bin/python -m benchmarks.plan_cost
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.host_memory
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.recovery_cost
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.checkpoints

# For one CUDA device; without one a rehearsal of every part on the CPU.
gpu: $(STAMP)
	.venv/bin/python -m benchmarks.gpu

# Without a GPU, but beside a torch for CUDA, as torchvision needs it.
plans: $(STAMP) $(SIMULATED_STAMP)
	PYTHONPATH=.venv-simulated-gpu/torchvision .venv-simulated-gpu/bin/python -m benchmarks.stock_configs
	.venv/bin/python -m benchmarks.published_points

# Every stock config, on the CPU; those that need a GPU also on a simulated one.
starts: $(STAMP) $(SIMULATED_STAMP)
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.stock_starts
	OMP_NUM_THREADS=1 TEST_DEVICE=cuda .venv-simulated-gpu/bin/python -m benchmarks.stock_starts

# Search and recovery in other trainers.
integrations: $(INTEGRATIONS_STAMP) $(TORCHTITAN_STAMP)
	OMP_NUM_THREADS=1 .venv-integrations/bin/python -m pytest -m integrations tests/integrations/test_transformers.py \
		tests/integrations/test_plans_of_trl.py tests/documents/test_trl_script.py
	OMP_NUM_THREADS=1 .venv-torchtitan/bin/python -m pytest -m integrations tests/integrations/test_torchtitan.py

# Need root and install nothing: Slurm with two nodes on this machine (Debian's slurm-wlm and munge), and two networks.
slurm: $(STAMP)
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs -m exhaustive tests/recipes/test_slurm.py

cable: $(STAMP)
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs -m exhaustive tests/recipes/test_cut_cable.py

# Hours; `TESTS=tests/engine` runs those of one folder.
exhaustive: $(STAMP)
	$(IN_VENV) scripts/test -m exhaustive $(TESTS)

format: $(STAMP)
	.venv/bin/ruff format
	.venv/bin/ruff check --fix

clean:
	rm -rf .venv .venv-integrations .venv-torchtitan .venv-simulated-gpu demo_output site build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The bounds on torch pick a build for CPUs where one is at hand.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install 'pip>=25.1' # knows dependency groups
	.venv/bin/python -m pip install '$(TORCH)' -e '.[torchtune,plot]' --group dev
	.venv/bin/python -m pip install --no-deps --upgrade --target .venv/torchvision "torchvision==$$(.venv/bin/python -c \
		'import torch; print("0.%d.*" % (int(torch.__version__.split(".")[1]) + 15))')" # why apart: tests/support/images.py
	touch $@

# Without torchtune and torchao, beside which peft refuses LoRA.
$(INTEGRATIONS_STAMP): pyproject.toml tests/integrations/requirements.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install '$(TORCH)' -e . -r tests/integrations/requirements.txt $(LIGER)
	touch $@

$(TORCHTITAN_STAMP): pyproject.toml tests/integrations/requirements_torchtitan.txt
	$(PYTHON) -m venv .venv-torchtitan
	.venv-torchtitan/bin/python -m pip install '$(TORCH)' -e . -r tests/integrations/requirements_torchtitan.txt
	touch $@

# Tests, the parts of `make gpu` as far as they can run without a GPU, and plans against what torch reserves.
simulated-gpu: $(STAMP) $(SIMULATED_STAMP)
	PATH="$(CURDIR)/.venv-simulated-gpu/bin:$$PATH" scripts/test-simulated-gpu
	OMP_NUM_THREADS=1 .venv-simulated-gpu/bin/python -m benchmarks.gpu \
		--parts nccl,sizes,recovery,thrashing,tokens
	.venv-simulated-gpu/bin/python -m benchmarks.plan_accuracy --output benchmarks/results/plan_accuracy_simulated.md
	PYTHONPATH=.venv-simulated-gpu/liger .venv-simulated-gpu/bin/python -m benchmarks.trainer_accuracy \
		--output benchmarks/results/trainer_accuracy_simulated.md

# torch as it is for CUDA, with stand-ins for CUDA itself: see tests/simulated_gpu/README.md.
$(SIMULATED_STAMP): pyproject.toml tests/integrations/requirements.txt $(wildcard tests/simulated_gpu/*.*)
	rm -f .venv-simulated-gpu/stamp-*
	$(PYTHON) -m venv .venv-simulated-gpu
	.venv-simulated-gpu/bin/python -m pip install 'pip>=25.1'
	.venv-simulated-gpu/bin/python -m pip install --no-deps 'torch===$(SIMULATED_TORCH)'
	.venv-simulated-gpu/bin/python -m pip install --no-deps --upgrade --target .venv-simulated-gpu/headers \
		nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
	.venv-simulated-gpu/bin/python -m tests.simulated_gpu.install .venv-simulated-gpu/headers/nvidia/cu13/include
	.venv-simulated-gpu/bin/python -m pip install -e '.[torchtune]' --group dev -r tests/integrations/requirements.txt
	.venv-simulated-gpu/bin/python -m pip install --no-deps --upgrade --target .venv-simulated-gpu/torchvision torchvision==0.28.0
	.venv-simulated-gpu/bin/python -m pip install --no-deps --upgrade --target .venv-simulated-gpu/liger $(LIGER) # a simulated GPU has no Triton
	touch $@
