"""The typed recipe. One YAML file drives distil, train and eval; an unknown key is an error, never ignored.

`train:` is passed to `transformers.TrainingArguments`, except for three keys of draftsmith; `drafter.options` goes to
the drafter's `Options`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from draftsmith.recipes.conversations import ConversationsRecipe
from draftsmith.recipes.section import Day, MethodName, Section, check_name

SEED_SUFFIX = "-seed-"  # in a recipe's name, before the number of a comparison's further training seed
DRAFTER_KIND = "drafter"  # kind of an `eval.methods` entry: the run's trained drafter


class TargetRecipe(Section):
    """The target model p of speculative decoding, which is frozen in all stages."""

    model: str = Field(
        "embedded", description="Hub id, local folder, or `embedded` for the target that ships with draftsmith"
    )
    revision: str | None = Field(None, description="branch, tag or commit of the Hub repository `model`")
    gguf_file: str | None = Field(
        None,
        description="name of a GGUF file in the folder or repository `model`; converted once, into $DRAFTSMITH_CACHE",
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = Field(
        "auto", description="dtype of the target's weights and arithmetic; `auto`: the dtype of its checkpoint"
    )
    quantization: Literal["int8", "nf4"] | None = Field(
        None,
        description="load the target's linear layers, except the LM head, in 8 or 4 bits with bitsandbytes; "
        "training then reads the target's hidden states from disk or from servers",
    )
    attn_implementation: Literal["sdpa", "eager"] = Field(
        "sdpa",
        description="the target's attention in transformers; eager is used in any case where sdpa would ignore "
        "the target's logit soft caps or attention sinks",
    )
    device: str | None = Field(
        None, description="device of target and drafter: cpu, cuda, cuda:1, mps; by default CUDA if available, else CPU"
    )
    trust_remote_code: bool = Field(
        False, description="run Python code from the model's repository; it can do anything on this machine"
    )
    chat_template: str | None = Field(None, description="chat template as Jinja text, for a tokenizer that has none")
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="variables of the chat template, in all stages; use the values that serving will use, such as "
        "`{enable_thinking: false}` for Qwen3 without reasoning",
    )

    template_date: Day | None = Field(
        None,
        description="date that the chat template writes in place of today's date, in all stages of the run; by default "
        "the day on which the run's first answers were distilled",
    )

    @property
    def display_name(self) -> str:
        """Return the target's name for publishing: the Hub id, or only the last part of a local folder's path."""
        path = Path(self.model)
        return path.name if path.is_dir() or path.is_absolute() else self.model


class DistillRecipe(Section):
    """Distillation: the target rewrites every assistant turn. `engine: none` trains on the conversations unchanged."""

    engine: Literal["transformers", "vllm", "openai", "none"] = Field(
        "transformers",
        description="engine that generates the answers, a file of `data/engines/`; `none`: keep the "
        "conversations' own answers",
    )
    options: dict[str, Any] = Field({}, description="options of that engine, see docs/guides/data.md#who-answers")
    model: str | None = Field(
        None,
        description="distil answers of this model in place of `target.model`: Hub id or folder of the quantised copy "
        "(FP8, AWQ, GPTQ) that will be served; needs engine vllm or transformers",
    )
    temperature: float = Field(0.0, ge=0, description="sampling temperature of the answers; 0 is greedy")
    top_k: int = Field(0, ge=0, description="sample from the K most likely tokens; 0: from all tokens")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the most likely tokens whose probabilities add up to this"
    )
    max_new_tokens: int = Field(512, ge=1, description="largest number of tokens of an answer")
    cut_answers: Literal["keep", "drop"] = Field(
        "drop",
        description="an answer that reaches max_new_tokens ends its conversation; `keep`: train on its tokens, "
        "without an end token; `drop`: leave it out",
    )
    features: bool = Field(
        False,
        description="keep the hidden states that servers of `draftsmith serve RECIPE --features` write next to their "
        "answers, so that training with `data.features.source: server` need not request them; needs engine openai",
    )

    @model_validator(mode="after")
    def _check_model(self) -> "DistillRecipe":
        if self.features and self.engine != "openai":
            raise ValueError(f"`features: true` needs `engine: openai`, whose servers write them, not {self.engine}")
        if self.model is not None and self.engine not in ("vllm", "transformers"):
            raise ValueError(f"`model` needs `engine: vllm` or `engine: transformers`, not {self.engine}")
        return self


class FeatureServersRecipe(Section):
    """vLLM servers of the target that write its hidden states: `draftsmith serve RECIPE --features`."""

    urls: list[str] = Field([], description="address of each server, as `http://host:8000`; all serve the same target")
    folder: str = Field(
        "features-served",
        description="folder that the servers write to and the trainer reads and empties: on a disk that all of them "
        "share, best in memory (`/dev/shm/...`) on one machine",
    )
    in_flight: int = Field(32, ge=1, description="most examples that a process has requested, not trained on yet")
    keep: bool = Field(
        False,
        description="keep the features in the run's folder: the first epoch asks the servers, later ones read the disk",
    )
    timeout_s: float = Field(600.0, gt=0, description="seconds without an answer after which training stops")


class FeaturesRecipe(Section):
    """Source of the target's hidden states for training: each step's forward, files in `features/`, or servers."""

    source: Literal["online", "offline", "server"] = Field(
        "online",
        description="`online`: compute the target's hidden states in every training step; `offline`: read those "
        "that `draftsmith features` wrote; `server`: ask vLLM servers for them. Only `online` runs the target",
    )
    server: FeatureServersRecipe = FeatureServersRecipe()
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="dtype of the hidden states on disk")
    batch_size: int = Field(
        8, ge=1, description="sequences in one forward of the target when features are computed offline"
    )

    @model_validator(mode="after")
    def _names_its_servers(self) -> Self:
        if self.source == "server" and not self.server.urls:
            raise ValueError("`source: server` needs `server.urls`, the servers' addresses")
        return self


class DataRecipe(Section):
    """Training data: conversations, distillation, tokens, and the target's features."""

    conversations: ConversationsRecipe = ConversationsRecipe()
    distill: DistillRecipe = DistillRecipe()
    max_length_tokens: int = Field(
        2048,
        ge=8,
        description="largest number of tokens of a training sequence; a longer answer is learned up to there",
    )
    reasoning_tokens: tuple[str, str] = Field(
        ("<think>", "</think>"),
        description="tokens that start and end the target's reasoning, which an answer's text may hold",
    )
    features: FeaturesRecipe = FeaturesRecipe()
    packing: bool = Field(
        False, description="train on sequences of several conversations, together at most max_length_tokens long"
    )
    eval_rows_frac: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the conversations to hold out of training, chosen by a hash of each; accuracy by "
        "depth and a draft chain's tau are measured on them at the end, and during training by `train.eval_strategy`",
    )
    tokenize_processes: int | None = Field(
        None, ge=1, description="number of processes that tokenize; by default one per processor, at most 8"
    )


class DrafterRecipe(Section):
    """The drafter to train. `kind` is a file's name in `models/drafters/`; `options` are the keys of its `Options`."""

    kind: str = Field(
        "parallel",
        description="drafter architecture, the name of a file in `models/drafters/`: parallel, eagle, medusa, ...",
    )
    options: dict[str, Any] = Field({}, description="options of that kind, listed in the documentation of drafters")
    init: str | None = Field(
        None,
        min_length=1,
        description="start from another drafter's weights: its folder or Hub id, also of one published for an "
        "engine, which is imported; or a recipe (a file or a shipped name), also with its own values, as "
        "`quickstart drafter.kind=eagle`; `draftsmith run` first trains that recipe's drafter, on this recipe's "
        "target and data",
    )


# Far above any real drafter: a larger number in a downloaded config would only fill the memory.
MOST_DEPTHS, MOST_LAYERS = 256, 512
MOST_NODES = 256  # most draft tokens of a tree, for which sessions reserve room


class MethodConfig(Section):
    """One decoding method, a row of the result table. The autoregressive baseline is always measured too.

    By default the run's drafter drafts a tree; `kind` names another method, a file in `eval/methods/`.
    """

    name: MethodName = Field(
        description="name of the method in tables and pictures; `{kind}` in it stands for `drafter.kind`"
    )
    kind: str = Field(
        DRAFTER_KIND,
        description="`drafter`, or a method that needs no training, a file of `eval/methods/`: prompt_lookup, "
        "ngram, ...",
    )
    options: dict[str, Any] = Field(
        {}, description="options of the method that `kind` names; a trained drafter takes none"
    )
    tree: Literal["chain", "static", "best_first", "tuned"] = Field(
        "chain",
        description="shape of the draft trees. `chain`: one path; `static`: the fixed `paths`; `best_first`: the "
        "most likely `nodes`; `tuned`: the tree that `draftsmith tune` found for this drafter on this machine",
    )
    max_depth: int | None = Field(
        None, ge=1, le=MOST_DEPTHS, description="most draft tokens along one path; by default all depths of the drafter"
    )
    nodes: int = Field(
        16,
        ge=1,
        le=MOST_NODES,
        description="draft tokens in a best_first tree, the root not counted",
    )
    branch: int = Field(
        8,
        ge=1,
        le=MOST_NODES,
        description="for best_first trees: candidates considered at each depth, the most likely tokens",
    )
    paths: list[list[int]] | None = Field(
        None,
        max_length=MOST_NODES,
        description="for static trees: Medusa-style paths, each a list of the tokens' ranks, from 0",
    )
    lookup: bool = Field(
        False,
        description="for best_first trees: also consider tokens that followed the same n-gram earlier in the text",
    )
    lenience: float = Field(
        1.0,
        gt=0,
        le=1,
        description="below 1, draft tokens are accepted more readily, which is NOT lossless (2211.17192, A.5)",
    )
    drafter: str | None = Field(
        None,
        description="trained drafter of this method: another run's drafter folder, or a Hub id, user/repo or "
        "user/repo@revision; by default the run's own",
    )

    @model_validator(mode="after")
    def _check_tree_keys(self) -> "MethodConfig":
        if (self.tree == "static") != (self.paths is not None):
            raise ValueError("`paths` goes with `tree: static` and with no other tree")
        if self.lookup and (self.kind != DRAFTER_KIND or self.tree != "best_first"):
            raise ValueError("`lookup: true` goes with a drafter's `tree: best_first` and with no other")
        if self.kind == DRAFTER_KIND and self.options:
            raise ValueError(
                "leave `options` out: it is for methods of another `kind`; a drafter's options are stored with its "
                "weights"
            )
        return self


class EvalRecipe(Section):
    """Evaluation: the questions, the decoding settings, and the methods to measure."""

    questions: str | list[str] = Field(
        "embedded",
        description="questions to measure on: `embedded`, which ship with draftsmith; `spec_bench`, `mt_bench`, "
        "`humaneval`, `gsm8k`, `math_500` or `mbpp`, downloaded once; a file in one of their formats, as SPEED-Bench's "
        "are; or a list of several",
    )
    limit_per_category: int | None = Field(
        None, ge=1, description="use only the first n questions of each category; by default all"
    )
    limit_per_task: int | None = Field(
        None,
        ge=1,
        description="use only the first n questions of each task, taken in turn from its categories (in "
        "Spec-Bench's own file MT-bench has eight; MATH-500's subjects are one task; elsewhere each category is "
        "one); in place of `limit_per_category`",
    )
    max_new_tokens: int = Field(512, ge=1, description="largest number of tokens of an answer")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="strings that end an answer, in addition to the end tokens; they are not part of its text"
    )
    runs: int = Field(3, ge=1, description="how often every question is answered, to measure the spread of times")
    warmup_questions: int = Field(
        2, ge=0, description="number of questions to answer before the measurement, not counted"
    )
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0], min_length=1, description="temperatures at which the baseline and every method are measured; 0 is greedy"
    )
    top_k: int = Field(0, ge=0, description="sample from the K most likely tokens; 0: from all tokens")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the most likely tokens whose probabilities add up to this"
    )
    compile: bool | None = Field(
        None,
        description="on CUDA run the target with torch.compile, for the baseline too, and the drafters; by "
        "default if a C++ compiler, which it needs, is installed and DRAFTSMITH_COMPILE is not 0. On a CPU the "
        "layers of Llama, Mistral and Qwen run in one call instead",
    )
    methods: list[MethodConfig] = Field([MethodConfig(name="parallel-chain", tree="chain")])

    @field_validator("questions", mode="before")
    @classmethod
    def _check_questions(cls, value: Any) -> Any:
        if isinstance(value, str) or (
            isinstance(value, list) and value and all(isinstance(each, str) for each in value)
        ):
            return value
        raise ValueError("must be the name or the file of a set of questions, or a list of several")

    @property
    def question_sets(self) -> list[str]:
        """Return the names or files of all question sets in `questions`, as a list."""
        return [self.questions] if isinstance(self.questions, str) else self.questions

    @model_validator(mode="after")
    def _check_limits(self) -> "EvalRecipe":
        if self.limit_per_category is not None and self.limit_per_task is not None:
            raise ValueError("`limit_per_category` and `limit_per_task` exclude each other: set one of them to null")
        return self


class Recipe(Section):
    """Everything one run needs; see `recipes/quickstart.yaml` for a commented example."""

    extends: str | None = Field(
        None,
        exclude=True,  # left out of stored recipes, which contain the extended recipe's values
        description="a shipped recipe's name, or a path from this file's folder: start from that recipe's values",
    )
    name: Annotated[str, AfterValidator(check_name)] = Field(description="name of the run's folder under runs_dir")
    runs_dir: str = Field("runs", description="folder that holds all run folders")
    seed: int = Field(0, description="seed of all random numbers")
    target: TargetRecipe = TargetRecipe()
    data: DataRecipe = DataRecipe()
    drafter: DrafterRecipe = DrafterRecipe()
    train: dict[str, Any] = Field(
        {},
        description="any argument of `transformers.TrainingArguments`, unchanged; also `global_batch_size`, the "
        "sequences of one optimizer step over all processes, each of which computes `per_device_train_batch_size` "
        "at a time; and `optimizer`, `adamw` or `muon` (for the matrices of linear layers), with "
        "`muon_learning_rate`",
    )
    eval: EvalRecipe = EvalRecipe()

    @property
    def answering_target(self) -> TargetRecipe:
        """Return the model whose answers are distilled: `data.distill.model` in its saved dtype, or else the target."""
        copy = self.data.distill.model
        as_saved = {"model": copy, "revision": None, "gguf_file": None, "dtype": "auto", "quantization": None}
        return self.target if copy is None else self.target.model_copy(update=as_saved)
