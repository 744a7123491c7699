"""`draftsmith eval --engine vllm`: the same questions through real vLLM, with and without the exported drafter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from transformers import PreTrainedConfig

from draftsmith.data.engines.engine import EngineSetting, GenerationSettings
from draftsmith.data.engines.vllm_engine import VllmOptions, VllmServer, require_vllm, server_arguments
from draftsmith.data.sources.questions import Question, load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.eval.artifacts.measurement import NOTES, RECORDS, drafter_weights, recorded_settings
from draftsmith.eval.artifacts.proof import GreedyProof
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, first_turn_ids, session_length_tokens
from draftsmith.eval.commands.evaluate import rewrite_report
from draftsmith.eval.commands.prove import compare_answers
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.serving.asking import DRAFTING, PLAIN, Asked, Asking, ask, level_figures, with_speedups
from draftsmith.eval.serving.cpu_sampling import PLUGIN, PLUGIN_GROUP, SWITCH
from draftsmith.eval.serving.endpoint import Endpoint
from draftsmith.eval.serving.options import CORRECTION, OPTIONS_KEY, ServingOptions
from draftsmith.eval.serving.own import chain_of, own_figures
from draftsmith.eval.serving.result import GIVEN, STARTED, Served, recorded_served
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.decoding.kv_cache import cache_shape
from draftsmith.models.formats.exporting import (
    export_run,
    refuse_inexpressible,
    speculative_config,
    trained_drafter,
)
from draftsmith.models.formats.layout import drafted_tokens
from draftsmith.models.target.loading import (
    load_generation_config,
    load_target,
    load_tokenizer,
    longest_sequence_tokens,
    target_location,
    target_without_weights,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import explain
from draftsmith.recipes.masking import masked
from draftsmith.recipes.results import write_result
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.run_lock import alone_in_its_run
from draftsmith.recipes.schema import MethodRecipe, Recipe

ENGINE_FORMAT = "vllm"
WARMUP_QUESTIONS, WARMUP_NEW_TOKENS = 2, 16
LARGEST_CPU_CACHE_BYTES = 4 << 30
CACHE_BLOCK_TOKENS = 128  # vLLM's on a CPU
BYTES_OF_AN_ELEMENT = 4


@dataclass(frozen=True)
class _Setting:
    """What both arms share. first_prompts: ids of each question's first turn."""

    recipe: Recipe
    options: ServingOptions
    questions: list[Question]
    tokenizer: Any
    end_ids: tuple[int, ...]

    @property
    def of_engine(self) -> EngineSetting:
        return EngineSetting(self.recipe, self.tokenizer, target_location(self.recipe.target), self.end_ids)

    @property
    def first_prompts(self) -> dict[int | str, tuple[Question, list[int]]]:
        return {each.question_id: (each, first_turn_ids(self.tokenizer, each)) for each in self.questions}


@dataclass(frozen=True)
class _Measured:
    """One arm at one temperature and concurrency."""

    arm: str
    temperature: float
    concurrency: int
    asked: Asked


@alone_in_its_run("eval")
def evaluate_in_engine(recipe: Recipe, options: ServingOptions, console: Console) -> Served:
    """Measure, show, and write `eval/vllm.json` (`vllm-server.json` of a given server); the report, if there is one,
    again.

    Raises:
        UserError: No trained drafter, one that vLLM cannot serve, no vLLM, no server, or a wrong option.
    """
    if recipe.eval.stop:
        raise UserError("eval.stop: strings that end an answer are not sent to an engine: set eval.stop=[]")
    tokenizer = load_tokenizer(recipe.target)
    end_ids = tuple(answer_end_ids(load_generation_config(recipe.target), tokenizer))
    questions = load_questions(recipe.eval.questions, recipe.eval.limit_per_category, recipe.eval.limit_per_task)
    setting = _Setting(recipe, options, questions, tokenizer, end_ids)
    notes: list[str] = []
    with ExitStack() as stack:
        arms = _started_arms(setting, notes) if options.server is None else _given_arms(setting, notes, stack)
        measured = [each for arm, endpoint in arms.items() for each in _measure(setting, arm, endpoint)]
    rows = with_speedups([level_figures(m.asked, m.arm, m.temperature, m.concurrency) for m in measured])
    own = _own_rows(setting, rows, notes)
    notes += _count_sentences(measured)
    figures = {
        "place": _place(options),
        "questions": len(questions),
        "rows": rows,
        "own": own,
        "greedy": [],
        "notes": notes,
    }
    # Written before the target is loaded for the greedy answers that differ: measuring takes long.
    file = RunFolder(recipe).eval / (STARTED if options.server is None else GIVEN)
    _write_answers(file, measured)
    write_result(file, figures)
    greedy = _greedy_proofs(setting, measured)
    figures |= {"greedy": [asdict(proof) for proof in greedy.values()], "notes": [*notes, *_greedy_sentences(greedy)]}
    write_result(file, figures)
    served = next(each for each in recorded_served(recipe) if each.place == figures["place"])
    served.show(console)
    if (file.parent / NOTES).is_file():
        rewrite_report(recipe)
    return served


def _place(options: ServingOptions) -> str:
    return "started for this measurement" if options.server is None else f"served at {masked(options.server)}"


def _started_arms(setting: _Setting, notes: list[str]) -> dict[str, AbstractContextManager[Endpoint]]:
    """Both servers by how they are opened, one after the other; the drafter is exported."""
    recipe, options = setting.recipe, setting.options
    engine_options = read_engine_options(options.engine_options)
    drafter = trained_drafter(recipe)
    refuse_inexpressible(drafter.config, ENGINE_FORMAT)
    require_vllm("--engine vllm")
    if max(recipe.eval.temperatures) > 0:
        _check_sampling(options)
        notes += [f"Sampled with vLLM's kernel replaced ({CORRECTION})."] if options.correct_cpu_sampling else []
    exported = export_run(recipe, ENGINE_FORMAT, None)
    notes += [] if exported.caveat is None else [f"Mind: {exported.caveat}."]
    speculative = speculative_config(drafter.config, str(exported.folder.absolute()))
    target = target_without_weights(recipe.target)
    limit, new_tokens = longest_sequence_tokens(target), recipe.eval.max_new_tokens
    length = session_length_tokens(setting.tokenizer, setting.questions, new_tokens, None)
    length += drafted_tokens(drafter.config) + 1
    arguments = measured_arguments(
        engine_options,
        setting.of_engine,
        target.config,
        length if limit is None else min(length, limit),
        max(options.concurrency),
    )
    return {
        PLAIN: _started(setting, arguments),
        DRAFTING: _started(setting, {**arguments, "speculative_config": speculative}),
    }


@contextmanager
def _started(setting: _Setting, arguments: dict[str, Any]) -> Iterator[Endpoint]:
    environment = {SWITCH: "1"} if setting.options.correct_cpu_sampling else {}
    with closing(VllmServer(arguments, OPTIONS_KEY, environment)) as server:
        most = max(setting.options.concurrency)
        with closing(Endpoint(server.url, setting.of_engine, most, is_ours=True)) as endpoint:
            yield endpoint


def read_engine_options(values: dict[str, Any]) -> VllmOptions:
    """
    Raises:
        UserError: They are not vLLM's, or of several copies of the target.
    """
    try:
        options = VllmOptions.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(VllmOptions, error, OPTIONS_KEY)) from None
    if options.data_parallel_size > 1:
        raise UserError(f"{OPTIONS_KEY}: data_parallel_size is of distillation: one copy of the target is measured")
    return options


def measured_arguments(
    options: VllmOptions, setting: EngineSetting, config: PreTrainedConfig, length_tokens: int, most_at_once: int
) -> dict[str, Any]:
    """The arguments of `VllmServer`; those that the user left open are sized for these questions.

    Args:
        config: The target's.
        length_tokens: Of the longest conversation, with room for a draft.
        most_at_once: Requests.
    """
    sized: dict[str, Any] = {"max_model_len": length_tokens, "concurrency": most_at_once}
    if not torch.cuda.is_available():
        sized |= {"enforce_eager": True, "kv_cache_memory_bytes": cpu_cache_bytes(config, length_tokens, most_at_once)}
    chosen = {key: value for key, value in sized.items() if key not in options.model_fields_set}
    return server_arguments(options.model_copy(update=chosen), setting)


def cpu_cache_bytes(config: PreTrainedConfig, length_tokens: int, most_at_once: int) -> int:
    """Keys and values of as many conversations, the drafter's as many again; at most 4 GiB unless one needs more."""
    capacity = (length_tokens // CACHE_BLOCK_TOKENS + 2) * CACHE_BLOCK_TOKENS
    of_one = 2 * math.prod(cache_shape(config.get_text_config(), 1, capacity)) * BYTES_OF_AN_ELEMENT
    return max(of_one, min(most_at_once * of_one, LARGEST_CPU_CACHE_BYTES))


def _check_sampling(options: ServingOptions) -> None:
    on_a_cpu = not torch.cuda.is_available()
    if options.correct_cpu_sampling and not on_a_cpu:
        raise UserError(f"{CORRECTION} is for vLLM on a CPU, and this machine has a GPU: leave it out")
    if options.correct_cpu_sampling and not entry_points(group=PLUGIN_GROUP, name=PLUGIN):
        raise UserError(f"{CORRECTION}: vLLM does not see draftsmith's plugin: install draftsmith into its environment")
    if on_a_cpu and not options.correct_cpu_sampling:
        raise UserError(
            "vLLM 0.32 on a CPU draws from another distribution while it drafts at temperatures above 0: give "
            f"{CORRECTION}, which replaces the one function at fault in the server, or eval.temperatures=[0.0]"
        )


def _given_arms(setting: _Setting, notes: list[str], stack: ExitStack) -> dict[str, AbstractContextManager[Endpoint]]:
    """Connected to before anything is measured, so that what is wrong shows first."""
    options = setting.options
    assert options.server is not None
    urls = {PLAIN: options.plain_server, DRAFTING: options.server}
    arms: dict[str, AbstractContextManager[Endpoint]] = {}
    for arm, url in urls.items():
        if url is not None:
            most = max(options.concurrency)
            endpoint = Endpoint(url, setting.of_engine, most, options.server_model, options.api_key_env)
            arms[arm] = nullcontext(stack.enter_context(closing(endpoint)))
    if options.plain_server is None:
        notes.append("Without --plain-server there is no speedup, and greedy answers are not compared.")
    if max(setting.recipe.eval.temperatures) > 0:
        notes.append("A vLLM 0.32 server on a CPU draws from another distribution at temperatures above 0.")
    return arms


def _measure(setting: _Setting, arm: str, opened: AbstractContextManager[Endpoint]) -> Iterator[_Measured]:
    """Every temperature and concurrency in one engine, each with prompts that it has forgotten, where it can."""
    recipe = setting.recipe
    with opened as endpoint:
        warmup = GenerationSettings(max_new_tokens=min(WARMUP_NEW_TOKENS, recipe.eval.max_new_tokens))
        warmed = ask(endpoint, setting.questions[:WARMUP_QUESTIONS], Asking(setting.tokenizer, warmup, recipe.seed), 2)
        if warmed.answers:
            _check_arm(setting, arm, warmed)
        for temperature in recipe.eval.temperatures:
            settings = GenerationSettings(temperature, recipe.eval.top_k, recipe.eval.top_p, recipe.eval.max_new_tokens)
            for concurrency in setting.options.concurrency:
                endpoint.forget_prompts()
                asking = Asking(setting.tokenizer, settings, recipe.seed)
                label = f"{arm}, T={temperature:g}, {concurrency} at once"
                asked = ask(endpoint, setting.questions, asking, concurrency, label)
                if not asked.answers:
                    reasons = ", ".join(asked.failures) or f"no prompt leaves room for {FEWEST_NEW_TOKENS} tokens"
                    raise UserError(f"vLLM {arm} answered nothing ({reasons})")
                yield _Measured(arm, temperature, concurrency, asked)


def _check_arm(setting: _Setting, arm: str, warmed: Asked) -> None:
    """
    Raises:
        UserError: A server drafts that must not, or does not.
    """
    if setting.options.server is None:
        return
    if arm == DRAFTING and not warmed.counts.drafts and any(len(answer.ids) > 1 for answer in warmed.answers):
        raise UserError(
            f"{setting.options.server} drafts nothing: start it with the --speculative-config that `draftsmith export` "
            "prints"
        )
    if arm == PLAIN and warmed.counts.drafts:
        raise UserError(f"{setting.options.plain_server} drafts too: --plain-server is for the same target without one")


def _greedy_proofs(setting: _Setting, measured: list[_Measured]) -> dict[int, GreedyProof]:
    """With against without the drafter, by concurrency; of turns that were asked with the same prompt."""
    greedy = {(m.arm, m.concurrency): m.asked.answers for m in measured if m.temperature == 0}
    target = None
    proofs = {}
    for concurrency in setting.options.concurrency:
        if (PLAIN, concurrency) not in greedy:
            continue
        expected, found = (
            {f"{a.question_id}/{a.turn}": a for a in greedy[arm, concurrency]} for arm in (PLAIN, DRAFTING)
        )
        same = [key for key in expected if key in found and expected[key].prompt_ids == found[key].prompt_ids]
        prompts: list[tuple[int | str, list[int]]] = [(key, expected[key].prompt_ids) for key in same]
        answers: list[dict[int | str, list[int]]] = [{key: each[key].ids for key in same} for each in (expected, found)]
        if answers[0] == answers[1]:
            proofs[concurrency] = GreedyProof(f"{concurrency} at once", len(same), sum(map(len, answers[1].values())))
            continue
        target = target or load_target(setting.recipe.target)[0]
        longest = max(len(prompt) + len(answers[0][key]) for key, prompt in prompts)
        with TargetSession(target, longest) as session:
            proofs[concurrency] = compare_answers(target, session, f"{concurrency} at once", prompts, *answers)
    return proofs


def _greedy_sentences(proofs: dict[int, GreedyProof]) -> list[str]:
    """Differences one by one, ties named."""
    sentences = []
    for proof in proofs.values():
        same = proof.prompts - len(proof.divergences)
        sentences.append(f"Greedy, {proof.method}: {same} of {proof.prompts} answers are the same with the drafter.")
        for each in proof.divergences:
            why = "a numerical tie" if each.is_tie else "NO TIE"
            sentences.append(
                f"  question {each.question_id} differs at token {each.position}: {why} (the two largest logits are "
                f"{each.gap:.2g} apart, known to {each.noise:.2g})"
            )
    return sentences


def _count_sentences(measured: list[_Measured]) -> list[str]:
    """Where the counters are not of our answers alone, and what was not asked."""
    sentences = []
    for each in measured:
        counted, tokens = each.asked.counts.generated_tokens, sum(len(answer.ids) for answer in each.asked.answers)
        where = f"{each.arm}, T={each.temperature:g}, {each.concurrency} at once"
        if counted != tokens:
            sentences.append(
                f"{where}: the engine counted {counted} generated tokens, our answers have {tokens}, so its counters "
                "are not of these questions alone (others used the server, or answers failed)."
            )
        sentences += [f"{where}: {count} failed ({reason})." for reason, count in each.asked.failures.items()]
    left_out = max(each.asked.turns_left_out for each in measured)
    return sentences + ([f"{left_out} turn(s) leave no room for an answer and were left out."] if left_out else [])


def _own_rows(setting: _Setting, rows: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Of our own decoder, as far as `records.jsonl` has the same prompts and the same drafter."""
    folder, recipe = RunFolder(setting.recipe), setting.recipe
    if not (folder.eval / RECORDS).is_file():
        notes.append("Our own decoder has not been measured: `draftsmith eval` without --engine does.")
        return []
    recorded = recorded_settings(recipe)
    depth = max((len(row["acceptance_by_depth"]) for row in rows), default=0)
    chain = chain_of(recorded.eval, depth)
    of_this_run = recipe.model_copy(
        update={"eval": recipe.eval.model_copy(update={"methods": [MethodRecipe(name="x")]})}
    )
    same = recorded.target == recipe.target and drafter_weights(of_this_run)[0] in recorded.drafter_weights
    if chain is None or not same:
        why = f"no method is its whole chain of {depth}" if chain is None else "they are of another target or drafter"
        notes.append(f"Our own decoder's records are not compared: {why}.")
        return []
    records, evaluation = list(RecordLog(folder.eval / RECORDS)), recipe.eval
    own = []
    for temperature in evaluation.temperatures:
        sampling = Sampling(temperature, evaluation.top_k, evaluation.top_p)
        own += own_figures(records, chain.name, setting.first_prompts, sampling, evaluation.max_new_tokens)
    if not own:
        notes.append("Our own decoder's records have none of these prompts.")
    return with_speedups(own)


def _write_answers(file: Path, measured: list[_Measured]) -> None:
    """Every answer, beside the figures."""
    lines = []
    for each in measured:
        where = {"arm": each.arm, "temperature": each.temperature, "concurrency": each.concurrency}
        for answer in each.asked.answers:
            values = asdict(answer)
            del values["prompt_ids"]
            lines.append(json.dumps(where | values) + "\n")
    write_atomically(file.with_name(f"{file.stem}-answers.jsonl"), "".join(lines))
