"""The typed recipe. One YAML file drives distil, train and eval; an unknown key is an error, never ignored.

`train:` is passed to `transformers.TrainingArguments`, except for three keys of ours, and `drafter.options` to the
drafter's `Options`.
"""

import re
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

SEED_SUFFIX = "-seed-"  # in a recipe's name, before the number of a comparison's further training seed
DRAFTER_KIND = "drafter"  # kind of an `eval.methods` entry: the run's trained drafter
NOT_PATHS = ("stop", "chat_template")  # keys of texts in which a ~ is only a character


def check_name(name: str) -> str:
    """Check a name of files and folders, and return it.

    Raises:
        ValueError: It is not valid.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,79}", name) is None:
        raise ValueError(
            "must be at most 80 letters, digits, ., _ and -, the first one a letter or digit, as it becomes a file's "
            "name"
        )
    return name


def _check_method_name(name: str) -> str:
    """Check a method's name, or `recipe/method`, as comparisons call it, and return it."""
    recipe_name, slash, own_name = name.partition("/")
    return check_name(recipe_name) + (slash and slash + check_name(own_name))


MethodName = Annotated[str, AfterValidator(_check_method_name)]


def _expand_home(value: Any) -> Any:
    """Expand `~` in all texts that start with it, at any depth."""
    if isinstance(value, dict):
        return {key: inner if key in NOT_PATHS else _expand_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expand_home(inner) for inner in value]
    if isinstance(value, str) and re.match(r"~[\w.-]*(/|$)", value):
        try:
            return str(Path(value).expanduser())
        except RuntimeError:  # no such user: it is no path
            return value
    return value


class Section(BaseModel):
    """A section of the recipe, which refuses unknown keys. Its paths may start with `~`."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _expand_paths(cls, values: Any) -> Any:
        return _expand_home(values)


class TargetRecipe(Section):
    """The target model p, frozen throughout."""

    model: str = Field(
        "embedded", description="Hub id, local folder, or `embedded` for the target that ships with draftsmith"
    )
    revision: str | None = Field(None, description="of a Hub id: a branch, a tag or a commit")
    gguf_file: str | None = Field(
        None, description="a GGUF file in that folder or repository; converted once, into $DRAFTSMITH_CACHE"
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = Field(
        "auto", description="p runs in; `auto`: what its checkpoint is saved in"
    )
    quantization: Literal["int8", "nf4"] | None = Field(
        None, description="bitsandbytes: its linear layers, the LM head left out, in 8 or 4 bits; everywhere p runs"
    )
    attn_implementation: Literal["sdpa", "eager"] = Field(
        "sdpa",
        description="transformers' own, with a 4-D mask; eager where sdpa would drop soft caps or sinks of the target",
    )
    device: str | None = Field(None, description="cpu, cuda, cuda:1, mps; by default CUDA if there is one, else CPU")
    trust_remote_code: bool = Field(False, description="run the model's own Python code, which may do anything")
    chat_template: str | None = Field(None, description="Jinja text, for a tokenizer that ships no chat template")
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="variables of the chat template in all stages, set as for serving: `{enable_thinking: false}` for "
        "Qwen3 without thoughts",
    )

    @property
    def display_name(self) -> str:
        """Name for other people: the Hub id, or the last part of a local folder, which reveals no paths."""
        return Path(self.model).name if Path(self.model).expanduser().is_dir() else self.model


class ColumnsRecipe(Section):
    """Names of a record's columns. Default: the usual names; two of them with different text are an error."""

    messages: str | None = Field(
        None, description="messages, conversations or conversation: the list of turns, or its JSON text"
    )
    prompt: str | None = Field(
        None, description="prompt, instruction, question or turns; text, or a list of user turns"
    )
    input: str | None = Field(None, description="input or context: text that goes under the first prompt")
    answer: str | None = Field(None, description="response, output, answer or completion; may be absent or empty")
    system: str | None = Field(None, description="system_prompt or system")


class SourceRecipe(Section):
    """One source of conversations."""

    source: str = Field(
        "stdlib", description="local .json/.jsonl/.csv(.gz/.xz/.zst)/.parquet, Hub dataset id, or `stdlib`, which ships"
    )
    name: str | None = Field(None, description="for counts and the data card; by default the file's or the dataset's")
    hub_split: str = Field("train", description="the split of a Hub dataset")
    hub_config: str | None = Field(None, description="the configuration of a Hub dataset that has several")
    file: str | None = Field(None, description="one file of a Hub dataset, for repositories that hold several")
    revision: str | None = Field(None, description="of a Hub dataset: a branch, a tag or a commit")
    columns: ColumnsRecipe = ColumnsRecipe()
    limit: int | None = Field(None, ge=1, description="take the first n conversations that can be used")

    @property
    def label(self) -> str:
        """Name of the source in counts."""
        if self.name is not None:
            return self.name
        without_suffixes = re.sub(r"(\.(jsonl?|ndjson|parquet|csv|tsv|gz|xz|zst))+$", "", self.source)
        return self.source if without_suffixes == self.source else PurePath(without_suffixes).name


class MixedSourceRecipe(SourceRecipe):
    """One source of a mixture."""

    source: str = Field(description="as of `data.conversations.source`")
    weight: float = Field(1.0, gt=0, description="its share of the conversations, relative to the other weights")


class FiltersRecipe(Section):
    """Filters of valid conversations; the dropped ones are counted. Default: none."""

    languages: list[str] = Field([], description="ISO 639-1 codes: user turns in another language are left out")
    min_turns: int = Field(1, ge=1, description="user turns")
    max_turns: int | None = Field(None, ge=1, description="user turns")
    min_turn_chars: int = Field(1, ge=1, description="of every user and assistant turn")
    max_turn_chars: int | None = Field(None, ge=1, description="of every user and assistant turn")
    max_tokens: int | None = Field(None, ge=1, description="of all turns together, in the target's tokens")


class ConversationsRecipe(SourceRecipe):
    """Sources of the prompts: one source, or a mixture of several.

    The `weight`s of a mixture are shares of the conversations, until a source is exhausted; the others then continue
    with theirs. They hold for the whole if `limit` is reached before.
    """

    mixture: list[MixedSourceRecipe] = Field([], description="several sources, in place of `source`")
    skip_invalid: bool = Field(False, description="count malformed conversations and continue")
    split: Literal["train", "heldout", "all"] = Field(
        "train", description="without the held-out conversations, these, or all"
    )
    heldout_frac: float = Field(
        0.0, ge=0, lt=1, description="held-out share, by a hash of the id; stdlib has a fixed split, by module"
    )
    decontaminate: list[str] | None = Field(
        None, description="question files whose questions are left out; by default eval.questions, [] for none"
    )
    contamination_words: int = Field(
        13, ge=5, description="number of consecutive words in common with a question that exclude a conversation"
    )
    filters: FiltersRecipe = FiltersRecipe()

    @field_validator("split", mode="before")
    @classmethod
    def _check_split(cls, value: Any) -> Any:
        if value not in ("train", "heldout", "all"):
            raise ValueError("must be train, heldout or all (a Hub dataset's own split is `hub_split`)")
        return value

    @model_validator(mode="after")
    def _check_sources(self) -> "ConversationsRecipe":
        if self.mixture:
            alone = SourceRecipe(limit=self.limit)
            for key in SourceRecipe.model_fields:
                if getattr(self, key) != getattr(alone, key):
                    raise ValueError(f"`{key}` belongs to the entries of `mixture`: move it there")
        labels = [source.label for source in self.sources]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"`mixture` has two sources with the name {twice}: give one another `name`")
        if self.split == "heldout" and not self.heldout_frac and any(s.source != "stdlib" for s in self.sources):
            raise ValueError("`split: heldout` needs a `heldout_frac` above 0")
        return self

    @property
    def sources(self) -> list[MixedSourceRecipe]:
        """Sources of the mixture, or the single source, without `limit`, which applies to the whole."""
        if self.mixture:
            return self.mixture
        values = {key: getattr(self, key) for key in SourceRecipe.model_fields if key != "limit"}
        return [MixedSourceRecipe(**values)]


class DistillRecipe(Section):
    """Distillation: the target rewrites every assistant turn. `engine: none` trains on the conversations unchanged."""

    engine: Literal["transformers", "vllm", "openai", "none"] = Field(
        "transformers", description="engine that answers: a file of `data/engines/`; `none`: no answers"
    )
    options: dict[str, Any] = Field({}, description="of that engine, documented there")
    model: str | None = Field(
        None,
        description="distil answers of this model in place of `target.model`: Hub id or folder of the quantised copy "
        "(FP8, AWQ, GPTQ) that will be served; needs engine vllm or transformers",
    )
    temperature: float = Field(0.0, ge=0, description="of the answers; 0 is greedy")
    top_k: int = Field(0, ge=0, description="sample from the K most likely tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the most likely tokens of this mass together")
    max_new_tokens: int = Field(512, ge=1, description="of every answer")
    cut_answers: Literal["keep", "drop"] = Field(
        "drop",
        description="an answer that reaches max_new_tokens ends its conversation; `keep`: train on its tokens, without "
        "an end token",
    )

    @model_validator(mode="after")
    def _check_model(self) -> "DistillRecipe":
        if self.model is not None and self.engine not in ("vllm", "transformers"):
            raise ValueError(f"`model` is loaded by the engines vllm and transformers, not by {self.engine}")
        return self


class FeaturesRecipe(Section):
    """Target features for training: computed in every step, or once, into `features/`."""

    source: Literal["online", "offline"] = Field(
        "online", description="`offline`: train reads what `draftsmith features` wrote, and runs no target"
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="on disk")
    autocast: bool = Field(
        False,
        description="the target's products in bf16, its residual stream not; online only where `train.bf16` is on too",
    )
    batch_size: int = Field(8, ge=1, description="rows of one forward of the target offline")
    sharded: bool = Field(
        False, description="of several processes that run the target each holds a part of its layers (FSDP2)"
    )


class DataRecipe(Section):
    """Training data: conversations, distillation, tokens, and the target's features."""

    conversations: ConversationsRecipe = ConversationsRecipe()
    distill: DistillRecipe = DistillRecipe()
    max_length_tokens: int = Field(2048, ge=8, description="longer conversations are shortened, by whole turns")
    loops: Literal["keep", "mask"] = Field(
        "keep",
        description="`mask`: tokens of an answer in copies of twelve and more of its earlier tokens carry no loss, as "
        "where a small model's greedy answer repeats itself; they are still read",
    )
    reasoning: Literal["learn", "mask"] = Field(
        "learn",
        description="`mask`: the thoughts of an answer, up to the token that ends them, carry no loss; they are read",
    )
    reasoning_tokens: tuple[str, str] = Field(
        ("<think>", "</think>"), description="between which the target thinks; each is one token of its vocabulary"
    )
    features: FeaturesRecipe = FeaturesRecipe()
    packing: bool = Field(
        False, description="train on rows of several conversations, together at most max_length_tokens long"
    )
    eval_rows_frac: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the conversations, by a hash of each, that training leaves out: accuracy by depth and "
        "the tau of a chain are measured on them at the end, and on the way with `train.eval_strategy`",
    )
    train_answer_tokens: int | None = Field(
        None,
        ge=1,
        description="train on rows with this number of answer tokens, by the same hash: a smaller part of the data "
        "is contained in every larger one. Default: all rows",
    )
    tokenize_processes: int | None = Field(None, ge=1, description="by default one a processor, 8 at most")


class DrafterRecipe(Section):
    """`kind` is the name of a file in `models/drafters/`; `options` are the keys of its `Options`."""

    kind: str = Field("parallel", description="parallel, eagle, medusa, ...")
    options: dict[str, Any] = Field({}, description="of that kind")
    init: str | None = Field(
        None,
        min_length=1,
        description="start from the weights of another trained drafter: its folder, a Hub id, or a recipe (a file or a "
        "shipped name), whose drafter `draftsmith run` then trains first, on this recipe's target and data",
    )
    init_vocabulary: Literal["own", "extended"] = Field(
        "own",
        description="a reduced draft vocabulary after `init`, if its rows were not trained: tokens of this run's "
        "answers; `extended`: these and tokens of the trained drafter, for a run with few answers",
    )


class ValidationRecipe(Section):
    """Decisions by the tau of a chain on held-out rows (`data.eval_rows_frac`), every `train.eval_steps`."""

    keep: Literal["last", "best"] = Field(
        "last",
        description="the weights of the last step, or those of the evaluation with the highest tau, of which each or "
        "each n-th is saved (transformers' load_best_model_at_end)",
    )
    patience: int | None = Field(None, ge=1, description="evaluations without a higher tau, after which training ends")

    @property
    def decides(self) -> bool:
        """Return whether training depends on evaluations."""
        return self.keep == "best" or self.patience is not None


# Far above any real drafter: a larger number in a downloaded config would only fill the memory.
MOST_DEPTHS, MOST_LAYERS = 256, 512
MOST_NODES = 256  # draft tokens of a tree that sessions have room for


class MethodConfig(Section):
    """One method: a row of the table. The autoregressive baseline is always measured too.

    Default: a tree of the run's drafter; `kind` names another method, a file in `eval/methods/`.
    """

    name: MethodName = Field(description="the row of the table")
    kind: str = Field(
        DRAFTER_KIND, description="`drafter`, or a method that needs no training: prompt_lookup, ngram, ..."
    )
    options: dict[str, Any] = Field({}, description="of that kind; not for `drafter`")
    tree: Literal["chain", "static", "best_first", "adaptive", "tuned"] = Field(
        "chain",
        description="`adaptive`: the part of the best-first tree that pays in each round, by the drafter's confidence "
        "and the measured costs; `tuned`: the tree that `draftsmith tune` found for this drafter on this machine",
    )
    max_depth: int | None = Field(
        None, ge=1, le=MOST_DEPTHS, description="drafted tokens along one path; by default all K+1"
    )
    nodes: int = Field(
        16,
        ge=1,
        le=MOST_NODES,
        description="best_first: drafted tokens in the tree, the root not counted; adaptive: at most",
    )
    branch: int = Field(
        8, ge=1, le=MOST_NODES, description="best_first, adaptive: most likely tokens considered at each depth"
    )
    paths: list[list[int]] | None = Field(
        None, max_length=MOST_NODES, description="static: Medusa-style paths, ranks from 0"
    )
    lookup: bool = Field(
        False,
        description="best_first, adaptive: what followed a path's last tokens earlier in the text competes for the "
        "tree's places",
    )
    lenience: float = Field(
        1.0, gt=0, le=1, description="below 1 drafts are accepted more readily, which is NOT lossless (2211.17192, A.5)"
    )
    drafter: str | None = Field(
        None,
        description="folder of another run's drafter, or its Hub id, user/repo or user/repo@revision; by default the "
        "run's own",
    )

    @property
    def best_first(self) -> bool:
        """Return whether its trees are the most likely paths, or a part of them."""
        return self.tree in ("best_first", "adaptive")

    @model_validator(mode="after")
    def _check_tree_keys(self) -> "MethodConfig":
        if (self.tree == "static") != (self.paths is not None):
            raise ValueError("`paths` goes with `tree: static` and with no other tree")
        if self.lookup and (self.kind != DRAFTER_KIND or not self.best_first):
            raise ValueError("`lookup: true` goes with a drafter's `tree: best_first` or `adaptive` and with no other")
        if self.tree == "adaptive" and self.kind != DRAFTER_KIND:
            raise ValueError("`tree: adaptive` goes with `kind: drafter` and with no other")
        if self.kind == DRAFTER_KIND and self.options:
            raise ValueError("`options` are of methods of another `kind`; a drafter's are stored with its weights")
        return self


class EvalRecipe(Section):
    """Evaluation: the questions, the decoding settings, and the methods to measure."""

    questions: str = Field(
        "embedded",
        description="a file in Spec-Bench's format, `embedded` for the questions that ship, or `spec_bench` for "
        "Spec-Bench's own, which are fetched once",
    )
    limit_per_category: int | None = Field(None, ge=1, description="the first n questions of each")
    limit_per_task: int | None = Field(
        None,
        ge=1,
        description="the first n questions of each task, in turn from its categories (in Spec-Bench's own file "
        "MT-bench has eight; elsewhere each is a task); in place of `limit_per_category`",
    )
    max_new_tokens: int = Field(512, ge=1, description="of every answer")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="strings that end an answer, in addition to the end tokens; they are not part of its text"
    )
    runs: int = Field(3, ge=1, description="number of times that every question is answered, for the spread of times")
    warmup_questions: int = Field(2, ge=0, description="answered first, and not counted")
    untimed_questions: int = Field(
        0, ge=0, description="answered once more, untimed, for the report: alpha as E[sum min(p, q)], operations"
    )
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0], min_length=1, description="every method, and the baseline, at each; 0 is greedy"
    )
    top_k: int = Field(0, ge=0, description="sample from the K most likely tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the most likely tokens of this mass together")
    compile: bool | None = Field(
        None,
        description="run the target through torch.compile, for the baseline too, and on CUDA the drafters; by default "
        "where there is a C++ compiler, which it needs, and DRAFTSMITH_COMPILE is not 0. On a CPU Llama's, Mistral's "
        "and Qwen's layers run in one call instead",
    )
    methods: list[MethodConfig] = [MethodConfig(name="parallel-chain", tree="chain")]

    @model_validator(mode="after")
    def _check_limits(self) -> "EvalRecipe":
        if self.limit_per_category is not None and self.limit_per_task is not None:
            raise ValueError("`limit_per_category` and `limit_per_task` exclude each other: set one of them to null")
        return self


class Recipe(Section):
    """Everything one run needs; see `recipes/quickstart.yaml` for a commented example."""

    extends: str | None = Field(
        None,
        exclude=True,  # of stored recipes: they hold what it stood for
        description="a shipped recipe's name, or a path from this file's folder: start from that recipe's values",
    )
    name: Annotated[str, AfterValidator(check_name)] = Field(description="the run's folder under runs_dir")
    runs_dir: str = Field("runs", description="folder of all run folders")
    seed: int = Field(0, description="of everything that is drawn at random")
    target: TargetRecipe = TargetRecipe()
    data: DataRecipe = DataRecipe()
    drafter: DrafterRecipe = DrafterRecipe()
    train: dict[str, Any] = Field(
        {},
        description="any argument of `transformers.TrainingArguments`, as it is; `global_batch_size`, the rows of a "
        "step of all processes together, of which each computes `per_device_train_batch_size` at a time; "
        "`optimizer`, `adamw` or `muon` for the matrices of linear layers, with `muon_learning_rate`",
    )
    validation: ValidationRecipe = ValidationRecipe()
    eval: EvalRecipe = EvalRecipe()

    @property
    def answering_target(self) -> TargetRecipe:
        """The model whose answers are distilled: `data.distill.model` in its saved dtype, or by default the target."""
        copy = self.data.distill.model
        as_saved = {"model": copy, "revision": None, "gguf_file": None, "dtype": "auto", "quantization": None}
        return self.target if copy is None else self.target.model_copy(update=as_saved)
