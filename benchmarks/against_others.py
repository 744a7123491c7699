"""Speed of our decoding compared with the usual alternatives: transformers and llama.cpp.

    python benchmarks/against_others.py --json docs/results/machinery/against_transformers.json
    python benchmarks/against_others.py "smollm2-135m drafter.kind=draft_model" target.model=FOLDER
        target.gguf_file=NAME.gguf --ours smollm2-135m "smollm2-135m drafter.kind=eagle"

One run with the same target, prompts, token limit and end tokens, greedy; all sides take turns prompt by prompt.
Seconds are of the whole answer, prefill included; decoding alone is also given for sides that report it.

transformers: `generate`, its prompt lookup, and its assisted generation with the draft model of the first recipe, if
that has a trained one (`draftsmith train quickstart drafter.kind=draft_model`), with `--gamma` tokens a round, as ours
does, and with its own defaults. Its target is a copy as a user has it, ours is packed as in an evaluation. Every answer
of transformers' and of ours is compared with `generate`'s: exit code 1 if one differs, unless at a numerical tie.

llama.cpp: plain decoding by `llama-server` (`make llamacpp-env`), if the target is a GGUF file. In
F32 and BF16 it has the target's weights, and answers that differ are counted: another implementation rounds otherwise.
Q8_0 and Q4_0 are other models, whose answers are not compared.

`--ours`: recipes whose drafters and other methods are measured as ours; the speed of the best one over transformers'
best speculation, and over llama.cpp in the target's dtype, is a user's gain from switching.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from parts.llamacpp import TARGET_DTYPES, Complete, llama_server, programs_and_files
from parts.timing import benchmark_parser, write_figures
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.cli.stages import joint_recipe
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.errors import UserError, exit_with_one_sentence
from draftsmith.eval.bench.divergence import divergence_at, first_difference
from draftsmith.eval.bench.measured_methods import Arm, load_models, measured_methods
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.session import TargetSession, open_session
from draftsmith.eval.methods.draft_model import DraftModelDecoder
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.methods.prompt_lookup import PromptLookup
from draftsmith.models.base.registry import load_drafter, load_drafter_class
from draftsmith.models.drafters.draft_model import DraftModel, as_causal_lm
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_compared
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import MethodConfig, Recipe

GREEDY = Sampling()
BASELINE = "transformers: generate"
PLAIN = "ours: autoregressive"
# Our methods with the same draft as one of transformers': from the same draft model, or the same n-grams.
SAME_DRAFT = {
    PLAIN: BASELINE,
    "ours: speculative sampling": "transformers: assisted generation",
    "ours: prompt lookup": "transformers: prompt lookup",
}
# Name of the model whose answers a side generates.
TARGET = "the target"
SAME_WEIGHTS = "the target's weights in another implementation"
OTHER_MODEL = "another model"


@dataclass
class Workload:
    """Workload of every side: prompts, largest number of answer tokens, and end tokens."""

    prompts: list[list[int]]
    tokens: int
    end_ids: frozenset[int]

    @property
    def longest_tokens(self) -> int:
        return max(map(len, self.prompts)) + self.tokens


@dataclass
class TimedAnswer:
    """One answer and its times.

    ids: with the end token. seconds: of the whole answer, prefill included. decode_s: from the first token to the last;
    None if the side does not report it. accept_lengths: tokens of each round; empty for transformers.
    """

    ids: list[int]
    seconds: float
    decode_s: float | None = None
    accept_lengths: list[int] = field(default_factory=list)


@dataclass
class Side:
    answer: Callable[[list[int]], TimedAnswer]
    model: str = TARGET


def transformers_side(target: PreTrainedModel, workload: Workload, draft: Any = None, **how: Any) -> Side:
    """Build a side of `generate` with these arguments; for assisted generation `draft` is (model, its settings)."""
    if draft is not None:
        how["assistant_model"] = draft[0]

    def answer(prompt: list[int]) -> TimedAnswer:
        if draft is not None:  # another side may have changed its settings
            draft[0].generation_config = draft[1]
        begin_s = time.perf_counter()
        ids = target.generate(
            torch.tensor([prompt], device=target.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=target.device),
            max_new_tokens=workload.tokens,
            do_sample=False,
            eos_token_id=sorted(workload.end_ids) or None,
            pad_token_id=0,
            **how,
        )
        return TimedAnswer(ids[0, len(prompt) :].tolist(), time.perf_counter() - begin_s)

    return Side(answer)


def llama_side(complete: Complete, dtype: str, workload: Workload) -> Side:
    """Build a side of a `llama-server`."""

    def answer(prompt: list[int]) -> TimedAnswer:
        begin_s = time.perf_counter()
        answer = complete(prompt, workload.tokens)
        ids, decode_s = answer.ids, answer.rest_s
        return TimedAnswer(ids, time.perf_counter() - begin_s, decode_s)

    return Side(answer, SAME_WEIGHTS if dtype in TARGET_DTYPES.values() else OTHER_MODEL)


def our_side(session: TargetSession, measured: Arm, workload: Workload) -> Side:
    def answer(prompt: list[int]) -> TimedAnswer:
        session.read_layers(measured.feature_layers)
        out = generate(session, measured.method, prompt, GREEDY, workload.tokens, workload.end_ids)
        return TimedAnswer(out.ids, out.wall_time_s, out.wall_time_s - out.prefill_s, out.accept_lengths)

    return Side(answer)


def take_turns(
    sides: dict[str, Side], prompts: list[list[int]], runs: int, is_tie: Callable[[int, list[int], list[int]], bool]
) -> dict[str, Any]:
    """Return for each side tokens/s of each run, tau, and the number of answers unlike the baseline's in the first run.

    Args:
        sides: The baseline first.
        is_tie: Function that tells, from a prompt's number, the baseline's answer and another one, whether they differ
            by a numerical tie.
    """
    answers: dict[str, list[list[TimedAnswer]]] = {name: [] for name in sides}
    for _ in range(runs + 1):
        for name in sides:
            answers[name].append([])
        for prompt in prompts:
            for name, side in sides.items():
                answers[name][-1].append(side.answer(prompt))
    expected = [answer.ids for answer in answers[BASELINE][0]]
    figures = {}
    for name, side in sides.items():
        first, *counted = answers[name]  # the first warms up
        pairs = [(number, expected[number], answer.ids) for number, answer in enumerate(first)]
        different = [pair for pair in pairs if pair[1] != pair[2]]
        speeds = [sum(len(each.ids) for each in run) / sum(each.seconds for each in run) for run in counted]
        timed = [(len(each.ids) - 1, each.decode_s) for run in counted for each in run if each.decode_s]
        lengths = [length for run in counted for each in run for length in each.accept_lengths]
        figures[name] = {
            "model": side.model,
            "tokens_per_s": median(speeds),
            "tokens_per_s_of_runs": speeds,
            "decode_tokens_per_s": sum(tokens for tokens, _ in timed) / sum(time_s for _, time_s in timed)
            if timed
            else None,
            "tau": fmean(lengths) if lengths else None,
            "different_answers": None if side.model == OTHER_MODEL else len(different),
            "numerical_ties": sum(is_tie(*pair) for pair in different) if side.model == TARGET else None,
        }
    return figures


def ratio(sides: dict[str, Any], ours: str, theirs: str) -> dict[str, Any]:
    """Divide tokens/s run by run: above 1 we are faster."""
    speeds = (sides[name]["tokens_per_s_of_runs"] for name in (ours, theirs))
    ratios = [mine / other for mine, other in zip(*speeds, strict=True)]
    return {"ours": ours, "theirs": theirs, "ratio_median": median(ratios), "ratios": ratios}


def conclusions(sides: dict[str, Any], our_drafters: list[str], llama_dtype: str | None) -> dict[str, Any]:
    """Compare the same draft on both sides, our best with transformers' best speculation, and ours with llama.cpp's.

    llama.cpp's plain decoding in the target's dtype is set against our plain loop and our best.
    """
    pairs = [ratio(sides, ours, theirs) for ours, theirs in SAME_DRAFT.items() if ours in sides and theirs in sides]
    speculative = [name for name in sides if name.startswith("transformers: ") and name != BASELINE]
    speed = {name: side["tokens_per_s"] for name, side in sides.items()}
    their_best = max(speculative, key=speed.__getitem__)
    our_best = max(our_drafters, key=speed.__getitem__)
    llama = f"llama.cpp: {llama_dtype}"
    return {
        "same_draft": pairs,
        "best": ratio(sides, our_best, their_best),
        "llama_cpp": [ratio(sides, ours, llama) for ours in (PLAIN, our_best)] if llama in sides else [],
    }


def load_draft_model(recipe: Recipe, target: PreTrainedModel) -> PreTrainedModel | None:
    """Load the recipe's trained draft model as a standalone model; None if there is none."""
    folder = RunFolder(recipe).drafter
    if load_drafter_class(recipe.drafter.kind) is not DraftModel or not (folder / "config.json").is_file():
        print(f"no assisted generation: recipe {recipe.name} has no trained draft_model drafter in {folder}")
        return None
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, DraftModel)
    return as_causal_lm(drafter, target, tied=bool(target.config.tie_word_embeddings))


def transformers_sides(
    target: PreTrainedModel, workload: Workload, draft: PreTrainedModel | None, gamma: int
) -> dict[str, Side]:
    """Build the sides `generate`, assisted generation with fixed gamma and with its defaults, and prompt lookup."""
    sides = {BASELINE: transformers_side(target, workload)}
    if draft is not None:
        constant = GenerationConfig.from_dict(draft.generation_config.to_dict())
        constant.num_assistant_tokens = gamma
        constant.num_assistant_tokens_schedule = "constant"
        constant.assistant_confidence_threshold = 0.0
        for name, settings in (("", constant), (", defaults", draft.generation_config)):
            side = transformers_side(target, workload, (draft, settings))
            sides[f"transformers: assisted generation{name}"] = side
    lookup = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
    return sides | {"transformers: prompt lookup": transformers_side(target, workload, **lookup)}


def same_draft_methods(draft: PreTrainedModel | None, gamma: int, workload: Workload, vocab_size: int) -> Iterator[Arm]:
    """Build our versions of transformers' methods: the draft model with gamma tokens per round, and prompt lookup."""
    if draft is not None:
        decoder = DraftModelDecoder(draft, gamma, workload.longest_tokens, vocab_size)
        sampling = build_tree_drafter(MethodConfig(name="speculative sampling"), decoder, GREEDY)
        yield Arm(sampling, GREEDY, torch.Generator())
    lookup = PromptLookup("prompt lookup", max_ngram=3, num_tokens=10, match="earliest", partial=True)
    yield Arm(lookup, GREEDY, torch.Generator())


def get_ready(session: TargetSession, methods: list[Arm], workload: Workload) -> None:
    """Compile everything before anything is timed."""
    for measured in methods:  # so that the compiled target returns the feature layers of all methods
        session.read_layers(measured.feature_layers)
    if session.forward.compiler is not None:
        for measured in methods:  # the sizes of their trees
            session.read_layers(measured.feature_layers)
            generate(session, measured.method, workload.prompts[0], GREEDY, workload.tokens, workload.end_ids)
        session.forward.keep_sizes()


@exit_with_one_sentence()
def main() -> None:
    parser = benchmark_parser(__doc__)
    draft_model = "quickstart drafter.kind=draft_model"
    parser.add_argument("recipe", nargs="?", default=draft_model, help="of the target, and of a draft model")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every recipe")
    parser.add_argument("--ours", nargs="+", default=[], help="recipes of trained drafters that stand for us")
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gamma", type=int, default=4, help="tokens that the draft model drafts in a round")
    arguments = parser.parse_args()
    overrides = [*arguments.overrides, "eval.temperatures=[0.0]"]
    (recipe,), _ = load_compared([arguments.recipe, *overrides])
    others = load_compared([*arguments.ours, *overrides])[0] if arguments.ours else []
    for other in others:
        if other.target != recipe.target:
            raise UserError(f"recipes {recipe.name} and {other.name} have different targets: override target.model")
    nothing = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": []})})
    ours = joint_recipe(others, "ours") if others else nothing
    theirs, _ = load_target(recipe.target)
    target, tokenizer, drafters = load_models(ours)
    questions = load_questions(recipe.eval.question_sets, 1)
    prompts = first_turn_prompts(target, tokenizer, questions, arguments.prompts, arguments.new_tokens)
    end_ids = frozenset(answer_end_ids(target.generation_config, tokenizer))
    workload = Workload([ids for _, ids in prompts], arguments.new_tokens, end_ids)
    draft = load_draft_model(recipe, theirs)
    same_draft = list(same_draft_methods(draft, arguments.gamma, workload, target.config.vocab_size))
    plain, *drafting = measured_methods(ours, drafters, target, tokenizer, workload.longest_tokens)
    drafting = [measured for measured in drafting if measured.lenience == 1]
    methods = [plain, *same_draft, *drafting]
    program, files = programs_and_files(recipe.target, target.device)
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        session = stack.enter_context(open_session(target, workload.longest_tokens, ours.eval.compile))
        get_ready(session, methods, workload)
        sides = transformers_sides(theirs, workload, draft, arguments.gamma)
        for dtype, file in files.items():
            server = stack.enter_context(llama_server(program, file, threads, workload.longest_tokens))
            sides[f"llama.cpp: {dtype}"] = llama_side(server, dtype, workload)
        sides |= {f"ours: {measured.method.name}": our_side(session, measured, workload) for measured in methods}

        def is_tie(number: int, expected: list[int], ids: list[int]) -> bool:
            where = first_difference(expected, ids)
            prompt = workload.prompts[number]
            return where is not None and divergence_at(where, theirs, session, number, prompt, expected, ids).is_tie

        figures = take_turns(sides, workload.prompts, arguments.runs, is_tie)
    dtype = str(target.dtype).removeprefix("torch.")
    result = {
        "target": recipe.target.gguf_file or recipe.target.model,
        "dtype": dtype,
        "draft_model_trained": draft is not None,
        "prompts": len(workload.prompts),
        "new_tokens": workload.tokens,
        "gamma": arguments.gamma,
        "threads": threads,
        "sides": figures,
        **conclusions(
            figures, [f"ours: {measured.method.name}" for measured in drafting or same_draft], TARGET_DTYPES.get(dtype)
        ),
    }
    report(result)
    write_figures(arguments, result)
    if any(side["different_answers"] != side["numerical_ties"] for side in figures.values() if side["model"] == TARGET):
        raise SystemExit("error: greedy answers differ from those of `generate` (above), and not at a numerical tie")


def report(result: dict[str, Any]) -> None:
    for name, side in result["sides"].items():
        figures = {key: round(value, 2) for key, value in side.items() if isinstance(value, int | float)}
        print(f"{name}: {side['model']}, {', '.join(f'{key} {value}' for key, value in figures.items())}")
    for pair in [*result["same_draft"], result["best"], *result["llama_cpp"]]:
        print(f"{pair['ours']} over {pair['theirs']}: {pair['ratio_median']:.2f}x")


if __name__ == "__main__":
    main()
