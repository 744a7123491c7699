"""`draftsmith eval --engine vllm`: the same questions through real vLLM, with and without the exported drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from draftsmith.data.engines.engine import EngineSetting, GenerationSettings
from draftsmith.data.engines.vllm_engine import require_vllm
from draftsmith.data.sources.questions import Question, load_questions
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.eval.bench.record_log import RecordLog
from draftsmith.eval.bench.spec_bench import FEWEST_NEW_TOKENS, first_turn_ids, session_length_tokens
from draftsmith.eval.commands.evaluate import rewrite_report
from draftsmith.eval.commands.prove import compare_answers
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.kept.measurement import NOTES, RECORDS, drafter_weights, recorded_settings
from draftsmith.eval.kept.proof import GreedyProof
from draftsmith.eval.serving.asking import Asked, Asking, MeasuredEngine, ask
from draftsmith.eval.serving.cpu_sampling import corrected_cpu_sampling
from draftsmith.eval.serving.endpoint import ServedEndpoint
from draftsmith.eval.serving.figures import DRAFTING, PLAIN, level_figures, with_speedups
from draftsmith.eval.serving.offline import measured_arguments, offline_engine, read_options
from draftsmith.eval.serving.options import CORRECTION, ServingOptions
from draftsmith.eval.serving.own import chain_of, own_figures
from draftsmith.eval.serving.result import IN_PROCESS, SERVER, Served, recorded_served
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.formats.export import refuse_inexpressible
from draftsmith.models.formats.of_run import export_run, trained_drafter
from draftsmith.models.formats.served import drafted_tokens, speculative_config
from draftsmith.models.target.loading import (
    load_generation_config,
    load_target,
    load_tokenizer,
    longest_sequence_tokens,
    target_location,
    target_without_weights,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.masking import masked
from draftsmith.recipes.results import write_result
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.run_lock import alone_in_its_run
from draftsmith.recipes.schema import MethodRecipe, Recipe

ENGINE_FORMAT = "vllm"
WARMUP_QUESTIONS, WARMUP_NEW_TOKENS = 2, 16


@dataclass(frozen=True)
class _Setting:
    """What both arms share. first_prompts: ids of each question's first turn."""

    recipe: Recipe
    options: ServingOptions
    questions: list[Question]
    tokenizer: Any
    end_ids: tuple[int, ...]

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
    """Measure, show, and write `eval/vllm.json` (`vllm-server.json` of a server); the report, if there is one, again.

    Raises:
        UserError: No trained drafter, one that vLLM cannot serve, no vLLM, no server, or a wrong option.
    """
    if recipe.eval.stop:
        raise UserError("eval.stop: strings that end an answer are not sent to an engine: set eval.stop=[]")
    folder, tokenizer = RunFolder(recipe), load_tokenizer(recipe.target)
    end_ids = tuple(answer_end_ids(load_generation_config(recipe.target), tokenizer))
    questions = load_questions(recipe.eval.questions, recipe.eval.limit_per_category, recipe.eval.limit_per_task)
    setting = _Setting(recipe, options, questions, tokenizer, end_ids)
    notes: list[str] = []
    correction = corrected_cpu_sampling if options.correct_cpu_sampling else nullcontext
    with ExitStack() as stack:
        arms = _offline_arms(setting, notes) if options.server is None else _served_arms(setting, notes, stack)
        stack.enter_context(correction())
        measured = [each for arm, engine in arms.items() for each in _measure(setting, arm, engine)]
    rows = with_speedups([level_figures(m.asked, m.arm, m.temperature, m.concurrency) for m in measured])
    greedy = _greedy_proofs(setting, measured)
    own = _own_rows(setting, rows, notes)
    notes += [*_greedy_sentences(greedy), *_count_sentences(measured)]
    figures = {
        "place": _place(options),
        "questions": len(questions),
        "rows": rows,
        "own": own,
        "greedy": [asdict(proof) for proof in greedy.values()],
        "notes": notes,
    }
    write_result(folder.eval / (IN_PROCESS if options.server is None else SERVER), figures)
    _write_answers(folder, options, measured)
    served = next(each for each in recorded_served(recipe) if each.place == figures["place"])
    served.show(console)
    if (folder.eval / NOTES).is_file():
        rewrite_report(recipe)
    return served


def _place(options: ServingOptions) -> str:
    return "in this process" if options.server is None else f"served at {masked(options.server)}"


def _offline_arms(setting: _Setting, notes: list[str]) -> dict[str, AbstractContextManager[MeasuredEngine]]:
    """Both by how they are opened, one after the other; the drafter is exported."""
    recipe, options = setting.recipe, setting.options
    engine_options = read_options(options.engine_options)
    drafter = trained_drafter(recipe)
    refuse_inexpressible(drafter, ENGINE_FORMAT)
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
        EngineSetting(recipe, setting.tokenizer, target_location(recipe.target), setting.end_ids),
        target.config,
        length if limit is None else min(length, limit),
        max(options.concurrency),
    )
    return {
        PLAIN: offline_engine(arguments, setting.end_ids),
        DRAFTING: offline_engine({**arguments, "speculative_config": speculative}, setting.end_ids),
    }


def _check_sampling(options: ServingOptions) -> None:
    if not torch.cuda.is_available() and not options.correct_cpu_sampling:
        raise UserError(
            "vLLM 0.32 on a CPU draws from another distribution while it drafts at temperatures above 0: give "
            f"{CORRECTION}, which replaces the one function at fault in this process, or eval.temperatures=[0.0]"
        )


def _served_arms(
    setting: _Setting, notes: list[str], stack: ExitStack
) -> dict[str, AbstractContextManager[MeasuredEngine]]:
    """Connected to at once, so that what is wrong shows before anything is measured."""
    options = setting.options
    assert options.server is not None
    urls = {PLAIN: options.plain_server, DRAFTING: options.server}
    engines: dict[str, AbstractContextManager[MeasuredEngine]] = {}
    for arm, url in urls.items():
        if url is not None:
            endpoint = ServedEndpoint(
                url, options.server_model, options.api_key, setting.end_ids, max(options.concurrency)
            )
            engines[arm] = nullcontext(stack.enter_context(closing(endpoint)))
    if options.plain_server is None:
        notes.append("Without --plain-server there is no speedup, and greedy answers are not compared.")
    if max(setting.recipe.eval.temperatures) > 0:
        notes.append("A vLLM 0.32 server on a CPU draws from another distribution at temperatures above 0.")
    return engines


def _measure(setting: _Setting, arm: str, opened: AbstractContextManager[MeasuredEngine]) -> Iterator[_Measured]:
    """Every temperature and concurrency in one engine, each with prompts that it has forgotten, where it can."""
    recipe = setting.recipe
    with opened as engine:
        warmup = GenerationSettings(max_new_tokens=min(WARMUP_NEW_TOKENS, recipe.eval.max_new_tokens))
        warmed = ask(engine, setting.questions[:WARMUP_QUESTIONS], Asking(setting.tokenizer, warmup, recipe.seed), 2)
        if warmed.answers:
            _check_arm(setting, arm, warmed)
        for temperature in recipe.eval.temperatures:
            settings = GenerationSettings(temperature, recipe.eval.top_k, recipe.eval.top_p, recipe.eval.max_new_tokens)
            for concurrency in setting.options.concurrency:
                engine.forget_prompts()
                asking = Asking(setting.tokenizer, settings, recipe.seed)
                label = f"{arm}, T={temperature:g}, {concurrency} at once"
                asked = ask(engine, setting.questions, asking, concurrency, label)
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


def _write_answers(folder: RunFolder, options: ServingOptions, measured: list[_Measured]) -> None:
    """Every answer, beside the figures."""
    name = (IN_PROCESS if options.server is None else SERVER).removesuffix(".json")
    lines = []
    for each in measured:
        where = {"arm": each.arm, "temperature": each.temperature, "concurrency": each.concurrency}
        for answer in each.asked.answers:
            values = asdict(answer)
            del values["prompt_ids"]
            lines.append(json.dumps(where | values) + "\n")
    write_atomically(folder.eval / f"{name}-answers.jsonl", "".join(lines))
