"""Decoding: the target's forward over draft trees, and every kind of drafter in the loop, compiled or not.

Trees of 1 to 64 nodes are timed beside a single token, in turns. Of drafters: the draft alone, the loop around it, and
what a round asks of the device. They are random, but agree with the random target (`shapes.agree`): at T = 0 everything
is accepted, at T = 1 most. Loop efficiency is the measured speed over the one that tau predicts, with the times of the
draft and of the target's forward: `loop_efficiency` with the times inside the loop, as `eval/report/summary.py` has it,
`loop_efficiency_of_parts` with those of each alone. On a GPU the former counts what the device idles to a phase.

Shapes: P prompt, n committed tokens, F features.
"""

from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.eval.decoding.compiled_session import CompiledSession
from draftsmith.eval.decoding.loop import AnswerRecord, generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.eval.trees.verify import Sampling
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.compiling import BACKEND
from draftsmith.models.decoding.decoders import Compilable, SequenceDecoder, StepwiseDecoder
from draftsmith.recipes.schema import MethodRecipe
from parts.shapes import SEED, Shape, agree, random_drafter, random_prompt, random_target, random_tree, tree_paths
from parts.timing import Suite, compare, launches_per_round, seconds

# Without CUDA only to see that it works: Dynamo without a compiler.
BACKENDS = {"cuda": BACKEND, "cpu": "eager"}
CHANGES_TARGET = "medusa2"  # merges its LoRA into the target: last
COMPILED_KINDS = ("parallel", "eagle")  # one that drafts at once, one that drafts level by level
OBSERVED_TOKENS = 3  # committed between two drafts
DEEPEST = 5
RUNS = 2


def trees(suite: Suite, compiles: bool = False) -> None:
    """Measure the target's forward over a tree of each size, and the share of the memory's speed that it reaches."""
    shape, device = suite.shape, suite.device
    target = random_target(shape, device)
    weights_bytes = sum(p.numel() * p.element_size() for p in target.parameters())
    weights_bytes -= target.get_input_embeddings().weight.nbytes  # of which a step reads a row

    def figures(nodes: int) -> dict[str, Any]:
        """base_s: of the single token; weight_bytes_per_s: of the target's weights, read once."""
        tree, single = (partial(session.forward_tree, random_tree(number)) for number in (nodes, 1))
        single()  # compiled, if at all, before the other
        first_s = seconds(tree, device)
        compared = compare(tree, single, device, shape.repeats)
        read = {"context_tokens": session.length_tokens, "weight_bytes_per_s": weights_bytes / compared["median_s"]}
        return {**compared, "first_s": first_s, **read}

    with open_session(target, shape.session_tokens, compiles) as session, torch.inference_mode():
        session.prefill(random_prompt(shape))
        for nodes in shape.tree_nodes:
            suite.measure(f"{nodes}_nodes", figures, nodes)


def compiled_trees(suite: Suite) -> None:
    trees(suite, compiles=True)


def open_session(target: Any, length_tokens: int, compiles: bool) -> TargetSession:
    if compiles:
        return CompiledSession(target, length_tokens, backend=BACKENDS[target.device.type])
    return TargetSession(target, length_tokens)


def drafts(suite: Suite) -> None:
    kinds = sorted(drafter_kinds(), key=lambda kind: (kind == CHANGES_TARGET, kind != "parallel", kind))
    run_kinds(suite, kinds, compiles=False)


def compiled_drafts(suite: Suite) -> None:
    run_kinds(suite, list(COMPILED_KINDS), compiles=True)


def run_kinds(suite: Suite, kinds: list[str], compiles: bool) -> None:
    target = random_target(suite.shape, suite.device)
    for kind in kinds:
        suite.measure(kind, figures_of_kind, suite.shape, target, kind, compiles)


def figures_of_kind(shape: Shape, target: PreTrainedModel, kind: str, compiles: bool) -> dict[str, Any]:
    """Measure the loop with one kind of drafter, by tree and temperature."""
    target.get_output_embeddings().bias = None  # `agree` with the kind before
    drafter = random_drafter(kind, target).to(target.dtype).freeze()
    agree(target, drafter)
    decoder = drafter.decoder(shape.session_tokens)
    if compiles and isinstance(decoder, Compilable):
        decoder.compile(BACKENDS[target.device.type])
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in drafter.parameters())}
    with open_session(target, shape.session_tokens, compiles) as session:
        session.read_layers(drafter.feature_layers)
        depth = decoder.num_depths if isinstance(decoder, StepwiseDecoder) else drafter.config.num_depths
        shapes = [(tree, temperature) for temperature in (0.0, 1.0) for tree in ("chain", "tree")]
        methods = {each: drafting(shape, decoder, *each, min(depth, DEEPEST), target.device) for each in shapes}
        if isinstance(session, CompiledSession):  # all sizes before any is timed
            for (_, temperature), method in methods.items():
                answer(shape, session, method, temperature, shape.answer)
            session.keep_sizes()
        for (tree, temperature), method in methods.items():
            found[f"{tree}@{temperature:g}"] = figures_of_method(shape, session, method, temperature)
    return found


def drafting(
    shape: Shape, decoder: SequenceDecoder, tree: str, temperature: float, depth: int, device: torch.device
) -> DrafterMethod:
    """Make a method with a chain, or a fixed tree of `drafted_nodes`: a random drafter's best tree has no depth."""
    recipe = MethodRecipe(name=tree, max_depth=depth)
    if tree == "tree":
        recipe = MethodRecipe(name=tree, tree="static", paths=tree_paths(shape.drafted_nodes, depth))
    generator = torch.Generator(device).manual_seed(SEED)
    return DrafterMethod(tree, decoder, tree_builder(recipe, decoder), Sampling(temperature), generator)


def answer(shape: Shape, session: TargetSession, method: Method, temperature: float, tokens: int) -> AnswerRecord:
    """Generate the same answer in every turn, as far as the device computes the same."""
    generator = torch.Generator(session.device).manual_seed(SEED)
    return generate(session, method, random_prompt(shape), Sampling(temperature), tokens, generator=generator)


@torch.inference_mode()
def figures_of_method(
    shape: Shape, session: TargetSession, method: DrafterMethod, temperature: float
) -> dict[str, Any]:
    """Measure medians over turns, each beside the baseline, and what a round asks of the device."""

    def both() -> dict[str, float]:
        drafted, plain = (
            answer(shape, session, each, temperature, shape.answer) for each in (method, Autoregressive())
        )
        return loop_figures(drafted, plain)

    both()  # warms up
    by_turn = [both() for _ in range(min(RUNS, shape.repeats))]
    asked = launches_per_round(
        lambda tokens: answer(shape, session, method, temperature, tokens).rounds,
        shape.answer // 4,
        shape.answer,
        session.device,
    )
    medians = {key: median(figures[key] for figures in by_turn) for key in by_turn[0]}
    draft_s, verify_s = alone(shape, session, method)
    return {
        **medians,
        "draft_alone_s": draft_s,
        "verify_alone_s": verify_s,
        "loop_efficiency_of_parts": medians["tokens_per_s"] * (draft_s + verify_s) / medians["tau"],
        "round": asked,
    }


def loop_figures(answer: AnswerRecord, baseline: AnswerRecord) -> dict[str, float]:
    """Return seconds per round, and the loop's efficiency against the baseline of the same turn."""
    tau = sum(answer.accept_lengths) / answer.rounds
    draft_s, verify_s = answer.draft_s / answer.rounds, answer.verify_s / answer.rounds
    single_s = baseline.verify_s / baseline.rounds
    predicted = tau * single_s / (draft_s + verify_s)
    speeds = [sum(record.accept_lengths) / (record.wall_time_s - record.prefill_s) for record in (answer, baseline)]
    return {
        "tau": tau,
        "draft_s": draft_s,
        "verify_s": verify_s,
        "choose_s": answer.choose_s / answer.rounds,
        "commit_s": answer.commit_s / answer.rounds,
        "target_step_s": single_s,
        "tokens_per_s": speeds[0],
        "baseline_tokens_per_s": speeds[1],
        "speedup_predicted": predicted,
        "speedup": speeds[0] / speeds[1],
        "loop_efficiency": speeds[0] / speeds[1] / predicted,
    }


def alone(shape: Shape, session: TargetSession, method: DrafterMethod) -> tuple[float, float]:
    """Time a draft a few tokens after the one before, and the target's forward over its tree; medians in seconds.

    Each is timed from an idle device to an idle one, by the calls that the loop makes.
    """
    prompt, device = random_prompt(shape), session.device
    features = session.prefill(prompt).features
    method.start(prompt, features)
    trees: list[DraftTree] = []
    times_s: list[tuple[float, float]] = []
    for _ in range(shape.repeats):
        method.observe(prompt[-OBSERVED_TOKENS:], features[-OBSERVED_TOKENS:])
        draft_s = seconds(lambda: trees.append(method.propose()), device)
        times_s.append((draft_s, seconds(partial(session.forward_tree, trees[-1]), device)))
    drafts_s, forwards_s = zip(*times_s, strict=True)
    return median(drafts_s), median(forwards_s)
