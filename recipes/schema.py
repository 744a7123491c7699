"""The typed recipe. One YAML file drives distil, train and eval; an unknown key is an error, never ignored.

`train:` is handed to `transformers.TrainingArguments` as it is, `drafter.options` to the drafter's own config class.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DRAFTER_KIND = "drafter"  # of an `eval.methods` entry: the run's trained drafter


class Section(BaseModel):
    """A part of the recipe that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TargetRecipe(Section):
    """The target model p, frozen throughout."""

    model: str = Field(
        "embedded", description="Hub id, local folder, or `embedded` for the target that ships with draftsmith"
    )
    revision: str | None = None
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    device: str | None = Field(None, description="cpu, cuda, cuda:1, mps; by default CUDA if there is one, else CPU")
    trust_remote_code: bool = False
    chat_template: str | None = Field(None, description="Jinja text, for a tokenizer that ships no chat template")


class ConversationsRecipe(Section):
    """Where the prompts come from."""

    source: str = Field("stdlib", description="local .json/.jsonl(.gz/.xz/.zst), Hub dataset id, or `stdlib`")
    split: str = "train"
    file: str | None = Field(None, description="one file of a Hub dataset, for repositories that hold several")
    revision: str | None = None
    limit: int | None = Field(None, ge=1, description="take the first n valid conversations")
    skip_invalid: bool = Field(False, description="count malformed conversations and go on instead of stopping")


class DistillRecipe(Section):
    """How the target rewrites every assistant turn. `engine: none` trains on the conversations as they are."""

    engine: Literal["transformers", "none"] = "transformers"
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(512, ge=1)
    batch_size: int = Field(16, ge=1)


class DataRecipe(Section):
    conversations: ConversationsRecipe = ConversationsRecipe()
    distill: DistillRecipe = DistillRecipe()
    max_length_tokens: int = Field(2048, ge=8, description="longer conversations are cut on a turn boundary")


class DrafterRecipe(Section):
    """`kind` is the name of a file in `models/`; `options` are the keys of that drafter's config."""

    kind: str = "parallel"
    options: dict[str, Any] = {}


class MethodRecipe(Section):
    """One row of the table. The autoregressive baseline always runs beside it.

    By default a tree shape for the run's drafter; `kind` names another way of drafting, a file in `eval/methods/`.
    """

    name: str
    kind: str = Field(
        DRAFTER_KIND, description="`drafter`, or a method that needs no training: prompt_lookup, ngram, ..."
    )
    options: dict[str, Any] = Field({}, description="of that kind; not for `drafter`")
    tree: Literal["chain", "static", "best_first", "tuned"] = Field(
        "chain", description="`tuned`: what `draftsmith tune` found for this drafter on this machine"
    )
    max_depth: int | None = Field(None, ge=1, description="drafted tokens along one path; by default all K+1")
    nodes: int = Field(16, ge=1, description="best_first: drafted tokens in the tree, the root not counted")
    branch: int = Field(8, ge=1, description="best_first: most likely tokens considered at each depth")
    paths: list[list[int]] | None = Field(None, description="static: Medusa-style paths, ranks from 0")
    drafter: str | None = Field(None, description="folder of another run's drafter; by default the run's own")

    @model_validator(mode="after")
    def _static_needs_paths(self) -> "MethodRecipe":
        if (self.tree == "static") != (self.paths is not None):
            raise ValueError("`paths` goes with `tree: static` and with no other tree")
        if self.kind == DRAFTER_KIND and self.options:
            raise ValueError("`options` are of methods of another `kind`; a drafter's lie with its weights")
        return self


class EvalRecipe(Section):
    questions: str = Field(
        "embedded", description="Spec-Bench question.jsonl, or `embedded` for the questions that ship"
    )
    limit_per_category: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(512, ge=1)
    runs: int = Field(3, ge=1)
    warmup_questions: int = Field(2, ge=0)
    temperatures: list[float] = [0.0]
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    compile: bool = Field(
        False, description="run target and drafters through torch.compile, the baseline too; needs a C++ compiler"
    )
    methods: list[MethodRecipe] = [MethodRecipe(name="parallel-chain", tree="chain")]


class Recipe(Section):
    """Everything one run needs; see `recipes/quickstart.yaml` for a commented example."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's folder under runs_dir")
    runs_dir: str = "runs"
    seed: int = 0
    target: TargetRecipe = TargetRecipe()
    data: DataRecipe = DataRecipe()
    drafter: DrafterRecipe = DrafterRecipe()
    train: dict[str, Any] = {}
    eval: EvalRecipe = EvalRecipe()
