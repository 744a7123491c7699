"""`draftsmith bench RECIPE --engine vllm|sglang|llamacpp`: measure an engine with and without the drafter.

For each number of concurrent questions: tokens/s, time to the first token and acceptance by depth. Greedy answers with
the drafter are compared with those without, and acceptance with our own decoder's (`agreement.py`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from transformers import PreTrainedModel

from draftsmith.cli.agreement import compare_with_own_chain
from draftsmith.cli.artifacts import NOTES
from draftsmith.cli.console import console, print_table
from draftsmith.cli.evaluate import report_again
from draftsmith.cli.prove import compare_answers
from draftsmith.data.engines.engine import EngineSetting, GenerationSettings
from draftsmith.data.engines.server_process import ServerProcess
from draftsmith.data.engines.vllm_engine import VllmOptions, VllmServer, require_vllm, server_arguments
from draftsmith.data.sources.questions import Question, load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.errors import UserError, masked
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, session_length_tokens
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.engines.endpoint import Endpoint, LlamaEndpoint, SglangEndpoint
from draftsmith.eval.engines.llama_server import LlamaServer, find_server
from draftsmith.eval.engines.load_test import (
    DEFINITIONS,
    DRAFTING,
    ENGINES,
    NGRAM,
    PLAIN,
    ArmResult,
    EngineMeasurement,
    measurement_file,
    send_questions,
    with_speedups,
)
from draftsmith.files import write_atomically
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.formats import exporting
from draftsmith.models.formats.layout import drafted_tokens
from draftsmith.models.target import loading
from draftsmith.recipes.loading import explain, parse_yaml
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder, with_run_lock
from draftsmith.recipes.schema import Recipe
from draftsmith.results import write_result

OPTIONS_KEY = "--engine-options"
# Options of a server that is started here, and the engines that have them; and those of a given server.
OF_STARTED = {"engine_options": ("vllm",), "ngram": ("vllm", "llamacpp")} | dict.fromkeys(
    ("target_gguf", "dtype", "draft_tokens"), ("llamacpp",)
)
OF_GIVEN = ("plain_server", "server_model", "api_key_env")
CONCURRENCY = {"vllm": "1,4,16,64", "sglang": "1,4,16,64", "llamacpp": "1,4"}
FEWEST_QUESTIONS = 8  # with --questions-per-request
ENGINE_FORMAT = "vllm"
ENDPOINTS = {"vllm": Endpoint, "sglang": SglangEndpoint, "llamacpp": LlamaEndpoint}
# The engines' own lookups, of n-grams of two to four tokens; llama.cpp's have one length.
VLLM_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LLAMA_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m")
NGRAM_DRAFT = 5  # tokens that lookups draft where there is no drafter; otherwise as many as it drafts
WARMUP_QUESTIONS, WARMUP_NEW_TOKENS = 2, 16
CPU_CACHE_BYTES = 4 << 30  # vLLM's KV cache on a CPU; for longer conversations give kv_cache_memory_bytes
# Options with which llama-server's logits equal our fp32 target's, whatever its batch size.
UNROUNDED = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")


@dataclass(frozen=True)
class ServingOptions:
    """Options of `draftsmith bench`, described in its `--help`; None: the option was not given.

    Raises:
        UserError: The options contradict one another, or a number is invalid.
    """

    engine: str = "vllm"
    concurrency: str | None = None
    questions_per_request: int | None = None
    ngram: bool = False
    engine_options: str | None = None
    server: str | None = None
    plain_server: str | None = None
    server_model: str | None = None
    api_key_env: str | None = None
    target_gguf: Path | None = None
    dtype: str | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in filter(self.__getattribute__, (*OF_STARTED, *OF_GIVEN)):
            option = f"--{name.replace('_', '-')}"
            if self.engine not in OF_STARTED.get(name, (self.engine,)):
                raise UserError(f"option {option} does not apply to --engine {self.engine}: leave it out")
            if name in OF_GIVEN and self.server is None:
                raise UserError(f"option {option} needs --server, the URL of a running server that drafts: add it")
            if name in OF_STARTED and self.server is not None:
                raise UserError(f"option {option} is for a server that is started here: leave out {option} or --server")
        text = self.concurrency
        if text is not None and not all(word.strip().isdecimal() and int(word) > 0 for word in text.split(",")):
            raise UserError(f"option --concurrency: give numbers above 0, separated by commas, as 1,4,16, not {text!r}")
        if self.engine == "sglang" and self.server is None:
            raise UserError(
                "--engine sglang needs --server, the URL of a running server: start one with the command that "
                "`draftsmith export --to sglang` prints and --enable-metrics"
            )

    @property
    def name(self) -> str:
        return ENGINES[self.engine]

    @property
    def concurrencies(self) -> list[int]:
        """Return the numbers of concurrent questions to measure, ascending."""
        return sorted({int(word) for word in (self.concurrency or CONCURRENCY[self.engine]).split(",")})

    def choose(self, questions: list[Question], concurrency: int) -> list[Question]:
        """Return all questions, or `questions_per_request` * `concurrency` of them, at least 8, spread evenly."""
        wanted = max(FEWEST_QUESTIONS, (self.questions_per_request or len(questions)) * concurrency)
        wanted = min(wanted, len(questions))
        return [questions[place * len(questions) // wanted] for place in range(wanted)]


@dataclass(frozen=True)
class _Setting:
    """Questions and settings that the servers of all arms share."""

    recipe: Recipe
    options: ServingOptions
    questions: list[Question]
    engine: EngineSetting

    @property
    def has_drafter(self) -> bool:
        """Return whether a drafter is measured: with `ngram` the run may have no trained drafter."""
        return not self.options.ngram or (RunFolder(self.recipe).drafter / TRAINING_FILE).is_file()


@with_run_lock("bench")
def bench(recipe: Recipe, options: ServingOptions) -> EngineMeasurement:
    """Measure the drafter in an engine, print the tables and write them to `eval/<engine>.json`.

    With `--server` the file is `<engine>-server.json`. If the run has a report, it is updated.

    Raises:
        UserError: There is no trained drafter, the engine cannot serve it, the engine or server is missing, or an
            option is wrong.
    """
    if recipe.eval.stop:
        raise UserError(f"key `eval.stop`: bench sends no stop strings, but it is {recipe.eval.stop}: set eval.stop=[]")
    tokenizer = loading.load_tokenizer(recipe.target)
    end_ids = tuple(answer_end_ids(loading.load_generation_config(recipe.target), tokenizer))
    questions = load_questions(recipe.eval.question_sets, recipe.eval.limit_per_category, recipe.eval.limit_per_task)
    setting = _Setting(recipe, options, questions, EngineSetting(recipe, tokenizer, end_ids))
    notes = [] if setting.has_drafter else ["The run has no trained drafter: only n-gram lookups were measured."]
    start = _start_servers if options.engine == "vllm" else _start_llama_servers
    start = start if options.server is None else _connect_servers
    measured = [each for arm, endpoint in start(setting, notes).items() for each in _measure(setting, arm, endpoint)]
    rows = with_speedups([result.row for result in measured])
    notes += _count_sentences(measured)
    place = "started for this measurement" if options.server is None else f"served at {masked(options.server)}"
    served = EngineMeasurement(place, rows, notes, len(questions), options.name)
    # Written before the target is loaded to check the answers: a failure there must not lose the measurement.
    file = measurement_file(recipe, options.engine, options.server is not None)
    lines = [
        {"arm": row.arm, "temperature": row.temperature, "concurrency": row.concurrency, **asdict(answer)}
        for row, each in zip(rows, measured, strict=True)
        for answer in each.answers
    ]
    text = "".join(json.dumps({key: line[key] for key in line if key != "prompt_ids"}) + "\n" for line in lines)
    write_atomically(file.with_name(f"{file.stem}-answers.jsonl"), text)
    write_result(file, asdict(served))
    _check_answers(setting, measured, served)
    write_result(file, asdict(served))
    for headings, cells in served.tables():
        print_table(headings, cells)
    console.print(DEFINITIONS, style="italic")
    for note in served.notes:
        console.print(note, markup=False)
    if (file.parent / NOTES).is_file():
        report_again(recipe, show=False)
    return served


def _start_servers(setting: _Setting, notes: list[str]) -> Mapping[str, AbstractContextManager[Endpoint]]:
    """Export the drafter. Returns contexts that start a server for each arm."""
    recipe, options = setting.recipe, setting.options
    engine_options = read_engine_options(options.engine_options or "{}")
    drafter = exporting.trained_drafter(recipe).config if setting.has_drafter else None
    if drafter is not None:
        exporting.check_expressible(drafter, ENGINE_FORMAT)
    require_vllm("--engine vllm, without --server http://host:8000 of a running vLLM,")
    if max(recipe.eval.temperatures) > 0 and not torch.cuda.is_available():
        raise UserError(
            "vLLM 0.32 on a CPU samples from a wrong distribution when it drafts at temperatures above 0: set "
            "eval.temperatures=[0.0], or measure on a GPU"
        )
    depth = NGRAM_DRAFT if drafter is None else drafted_tokens(drafter)
    drafting: dict[str, dict[str, Any]] = {PLAIN: {}}
    if options.ngram:
        drafting[NGRAM] = {"speculative_config": VLLM_NGRAM | {"num_speculative_tokens": depth}}
    if drafter is not None:
        exported = exporting.export_run(recipe, ENGINE_FORMAT, None)
        notes += [] if exported.caveat is None else [f"Note: {exported.caveat}."]
        config = exporting.speculative_config(drafter, str(exported.folder.absolute()))
        drafting[DRAFTING] = {"speculative_config": config}
    target = loading.target_without_weights(recipe.target)
    limit, new_tokens = loading.longest_sequence_tokens(target), recipe.eval.max_new_tokens
    length = session_length_tokens(setting.engine.tokenizer, setting.questions, new_tokens, None)
    length = min(length + depth + 1, limit or sys.maxsize)
    most = max(options.concurrencies)
    arguments = vllm_arguments(engine_options, setting.engine, length, most)
    return {
        arm: _started(setting, partial(VllmServer, {**arguments, **more}, OPTIONS_KEY))
        for arm, more in drafting.items()
    }


def _start_llama_servers(setting: _Setting, notes: list[str]) -> Mapping[str, AbstractContextManager[Endpoint]]:
    """Export the drafter as a GGUF file for `llama-server`. Returns contexts as `_start_servers` does."""
    recipe, options = setting.recipe, setting.options
    program = find_server()
    if program is None:
        raise UserError(
            "llama-server was not found on PATH: build it with `make llamacpp-env`, or add its folder to PATH"
        )
    file, depth = exporting.get_target_gguf(recipe.target, options.target_gguf), options.draft_tokens or NGRAM_DRAFT
    drafting: dict[str, list[str]] = {}
    notes.append(f"Target {file.name}.")
    if setting.has_drafter:
        made = exporting.export_run(recipe, "gguf", None, options.target_gguf, options.dtype).made
        depth = options.draft_tokens or made.num_speculative_tokens
        words = shlex.split(made.command)
        words[words.index("--spec-draft-n-max") + 1] = str(depth)
        drafting[DRAFTING] = words[words.index("--model-draft") :]
        notes.append(f"Drafter in {options.dtype or 'bf16'}; trained to draft {made.num_speculative_tokens} tokens.")
    if options.ngram:
        drafting = {NGRAM: [*LLAMA_NGRAM, str(depth)], **drafting}
    length = session_length_tokens(setting.engine.tokenizer, setting.questions, recipe.eval.max_new_tokens, None)
    exactly = UNROUNDED if options.dtype == "f32" else ()
    how = (length + depth + 1, "--metrics", "-t", torch.get_num_threads(), *exactly)
    start = partial(LlamaServer, program, file, *how, at_once=max(options.concurrencies))
    return {arm: _started(setting, partial(start, *words)) for arm, words in {PLAIN: [], **drafting}.items()}


@contextmanager
def _started(setting: _Setting, start: Callable[[], ServerProcess]) -> Iterator[Endpoint]:
    """Start a server, connect to it, and end it with the context."""
    connect = ENDPOINTS[setting.options.engine]
    with closing(start()) as server, closing(connect(server.url, setting.engine, is_ours=True)) as endpoint:
        yield endpoint


def read_engine_options(text: str) -> VllmOptions:
    """Parse `--engine-options`, a YAML mapping `{key: value, ...}` of options for the vLLM server to start.

    Raises:
        UserError: The text is not a mapping, or a key is not an option of `VllmOptions`.
    """
    try:
        values = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"option {OPTIONS_KEY}: give a mapping, as '{{max_model_len: 2048}}', not {text!r}")
    try:
        return VllmOptions.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(VllmOptions, error, OPTIONS_KEY)) from None


def vllm_arguments(
    options: VllmOptions, setting: EngineSetting, length_tokens: int, max_concurrency: int
) -> dict[str, Any]:
    """Return the arguments of `VllmServer`: the user's options, and values sized for the questions where none is set.

    Args:
        length_tokens: Length of the longest conversation, with room for a draft.
        max_concurrency: Largest number of concurrent requests.
    """
    sized: dict[str, Any] = {"max_model_len": length_tokens, "concurrency": max_concurrency, "data_parallel_size": 1}
    if not torch.cuda.is_available():
        sized |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    chosen = {key: value for key, value in sized.items() if key not in options.model_fields_set}
    return server_arguments(options.model_copy(update=chosen), setting)


def _connect_servers(setting: _Setting, notes: list[str]) -> Mapping[str, AbstractContextManager[Endpoint]]:
    """Connect to both given servers before anything is measured, so that errors show early."""
    options = setting.options
    opened: dict[str, AbstractContextManager[Endpoint]] = {}
    for side, url in ((PLAIN, options.plain_server), (DRAFTING, options.server)):
        if url is not None:
            arguments = (url, setting.engine, options.server_model, options.api_key_env)
            opened[side] = closing(ENDPOINTS[options.engine](*arguments))
    if options.plain_server is None:
        notes.append("Without --plain-server no speedup is computed and greedy answers are not compared.")
    if max(setting.recipe.eval.temperatures) > 0 and options.engine == "vllm":
        notes.append("A vLLM 0.32 server on a CPU samples from a wrong distribution at temperatures above 0.")
    return opened


def _measure(setting: _Setting, arm: str, opened: AbstractContextManager[Endpoint]) -> Iterator[ArmResult]:
    """Measure every temperature and concurrency in one server, whose prefix cache is emptied before each, if it can be.

    Raises:
        UserError: The server given as `--plain-server` drafts, the one given as `--server` does not, or no question
            was answered.
    """
    choices, options, tokenizer = setting.recipe.eval, setting.options, setting.engine.tokenizer
    seed = setting.recipe.seed
    with opened as endpoint:
        warmup = GenerationSettings(max_new_tokens=min(WARMUP_NEW_TOKENS, choices.max_new_tokens))
        warmed = send_questions(endpoint, tokenizer, setting.questions[:WARMUP_QUESTIONS], warmup, seed, 2)
        if options.server is not None and arm == PLAIN and warmed.counts.drafts:
            raise UserError(
                f"option --plain-server: {options.plain_server} drafts: give a server of the target without drafter"
            )
        could_draft = arm != PLAIN and any(len(answer.ids) > 1 for answer in warmed.answers)
        if options.server is not None and could_draft and not warmed.counts.drafts:
            raise UserError(
                f"option --server: {options.server} does not draft: start it with the command that `draftsmith export` "
                "prints"
            )
        for temperature in choices.temperatures:
            settings = GenerationSettings(temperature, choices.top_k, choices.top_p, choices.max_new_tokens)
            for concurrency in options.concurrencies:
                endpoint.forget_prompts()
                questions = options.choose(setting.questions, concurrency)
                result = send_questions(endpoint, tokenizer, questions, settings, seed, concurrency, arm)
                if not result.answers:
                    reasons = ", ".join(result.row.failures) or f"no prompt leaves room for {FEWEST_NEW_TOKENS} tokens"
                    raise UserError(f"{options.name} ({arm}) answered no question: {reasons}")
                yield result


def _check_answers(setting: _Setting, measured: list[ArmResult], served: EngineMeasurement) -> None:
    """Compare greedy answers with and without drafting, and the drafter's acceptance with our own loop's.

    The figures and sentences are added to the measurement.
    """
    greedy = [result for result in measured if result.row.temperature == 0]
    plain = {result.row.concurrency: result for result in greedy if result.row.arm == PLAIN}
    drafting = [result for result in greedy if result.row.arm != PLAIN]
    pairs = [(plain[each.row.concurrency], each) for each in drafting if each.row.concurrency in plain]
    folder = RunFolder(setting.recipe).drafter
    drafted = [result for result in drafting if result.row.arm == DRAFTING and result.counts.drafts]
    drafted = drafted if (folder / "config.json").is_file() else []
    if not pairs and not drafted:
        return
    target = loading.load_target(setting.recipe.target)[0]
    for pair in pairs:
        _compare_greedy(setting, target, *pair, served)
    if drafted:
        engine, drafter = setting.options.engine, load_drafter(folder, target)
        lacks_first_row = exporting.lacks_first_row(drafter.config, exporting.FORMAT_OF_ENGINE.get(engine, engine))
        agreement = compare_with_own_chain(
            drafted[0], target, drafter, counts_last_rounds=engine != "llamacpp", lacks_first_row=lacks_first_row
        )
        if agreement is not None:
            served.own_chain = asdict(agreement)
            served.notes.append(agreement.sentence(served.engine))


def _compare_greedy(
    setting: _Setting, target: PreTrainedModel, plain: ArmResult, drafting: ArmResult, served: EngineMeasurement
) -> None:
    """Compare the answers to turns with equal prompts, and note for each difference whether it is a numerical tie."""
    expected, actual = ({f"{a.question_id}/{a.turn}": a for a in result.answers} for result in (plain, drafting))
    same = [key for key in expected if key in actual and expected[key].prompt_ids == actual[key].prompt_ids]
    prompts: list[tuple[int | str, list[int]]] = [(key, expected[key].prompt_ids) for key in same]
    answers: list[dict[int | str, list[int]]] = [{key: a[key].ids for key in same} for a in (expected, actual)]
    name = f"{drafting.row.arm}, concurrency {drafting.row.concurrency}"
    equal = sum(answers[0][key] == answers[1][key] for key in same)
    served.notes.append(f"Greedy, {name}: {equal} of {len(same)} answers equal those without drafting.")
    if equal < len(same) and setting.options.engine == "llamacpp" and setting.options.dtype != "f32":
        # llama.cpp's rounding is not our target's, so that ties cannot be recognised.
        served.notes.append(
            "llama.cpp rounds differently for other batch sizes, which can change answers; with --dtype f32 and a "
            "target in F32 it does not, and each difference can be checked."
        )
        return
    longest = max((len(prompt) + len(answers[0][key]) for key, prompt in prompts), default=1)
    with TargetSession(target, longest) as session:
        proof = compare_answers(target, session, name, prompts, *answers)
    served.greedy.append(asdict(proof))
    for each in proof.divergences:
        why = "a numerical tie" if each.is_tie else "NOT A TIE, so one of the two answers is not greedy"
        served.notes.append(
            f"  question {each.question_id} differs at token {each.position}: {why} (the two tokens' logits are within "
            f"{each.gap:.2g} of the largest; the numerical error is {each.noise:.2g})"
        )


def _count_sentences(measured: list[ArmResult]) -> list[str]:
    """Return sentences about counters that include other requests, failed requests, and turns that were left out."""
    sentences = []
    for result in measured:
        row = result.row
        if result.counts.generated_tokens != row.tokens:
            sentences.append(
                f"{row.label}: the engine counted {result.counts.generated_tokens} generated tokens, our answers "
                f"have {row.tokens}, so its counters include other requests (of other clients, or failed ones)."
            )
        sentences += [f"{row.label}: {count} answers failed: {reason}." for reason, count in row.failures.items()]
    left_out = max(result.row.turns_left_out for result in measured)
    return sentences + ([f"{left_out} turn(s) left no room for an answer and were not asked."] if left_out else [])
