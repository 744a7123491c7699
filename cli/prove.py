"""`draftsmith prove`: evidence, on the user's own target and drafter, that drafting changes nothing but the speed.

Methods with a lenience below 1 are not lossless: they are left out and named.

1. Greedy identity: every method's greedy answers are compared with those of the loop without a draft. The first
   difference is a numerical tie, at tokens whose logits are equal within rounding, or else a bug: the answer is not
   the target's (`draftsmith.eval.bench.divergence`).
2. Distribution: sampled answers against the target's probabilities, by Rosenblatt's transform. If x is drawn from p,
   u = p(tokens more likely than x) + v p(x) with v uniform is uniform on [0, 1], at every position and after any
   prefix. So one chi-square test covers all tokens of all answers, for any vocabulary and any prompts; the baseline's
   answers pass through the same test as a control.
3. Enumeration: the exact distribution of the verifier's result over all random draws (`enumeration.py`).

Shapes: P prompt, n answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.cli import artifacts
from draftsmith.cli.artifacts import DistributionProof, GreedyProof, Proof
from draftsmith.cli.console import console, print_table
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.errors import UserError
from draftsmith.eval.bench.divergence import divergence_at, first_difference
from draftsmith.eval.bench.measured_methods import Arm, load_models, measured_methods
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.decoding.session import TargetSession, open_session
from draftsmith.eval.report.sentences import proof_sentence
from draftsmith.eval.trees.enumeration import largest_error
from draftsmith.files import write_json
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.windows import rope_switch
from draftsmith.progress import progress_bar
from draftsmith.recipes.run_folder import RunFolder, with_run_lock
from draftsmith.recipes.schema import Recipe

BINS = 20  # of a distribution test
DEFAULT_TEMPERATURE = 1.0  # if the recipe has no temperature above 0


@with_run_lock("prove")
def prove(recipe: Recipe, prompts: int = 16, samples: int = 4, new_tokens: int = 48) -> Proof:
    """Test that the recipe's methods are lossless, and write the evidence to `runs/<name>/eval/proof.json`.

    Raises:
        UserError: There is no trained drafter, no lossless method, or no question that fits the target's context.
    """
    left_out = [method.name for method in recipe.eval.methods if method.lenience < 1]
    weights = artifacts.drafter_weights(recipe)
    lossless = [method for method in artifacts.with_tuned_trees(recipe).eval.methods if method.lenience == 1]
    if left_out and not lossless:
        raise UserError(
            f"eval.methods: every method ({', '.join(left_out)}) has a lenience below 1, which is not lossless, so "
            "there is nothing to prove: add a method without lenience"
        )
    temperatures = [t for t in recipe.eval.temperatures if t > 0] or [DEFAULT_TEMPERATURE]
    evaluation = recipe.eval.model_copy(update={"methods": lossless, "temperatures": [0.0, *temperatures]})
    recipe = recipe.model_copy(update={"eval": evaluation})
    target, tokenizer, drafters = load_models(recipe)
    questions = load_questions(recipe.eval.question_sets)
    first_turns = first_turn_prompts(target, tokenizer, questions, prompts, new_tokens)
    end_ids = frozenset(answer_end_ids(target.generation_config, tokenizer))
    length = max(len(ids) for _, ids in first_turns) + new_tokens
    methods = measured_methods(recipe, drafters, target, tokenizer, length)
    greedy: list[GreedyProof] = []
    distribution: list[DistributionProof] = []
    reference: dict[int | str, list[int]] = {}
    with (
        open_session(target, length, recipe.eval.compile) as session,
        progress_bar(len(methods), "prove", "method") as progress,
    ):
        for measured in methods:
            measured.generator.manual_seed(recipe.seed)
            name, sampling = measured.method.name, measured.sampling

            def answer(prompt: list[int], measured: Arm = measured) -> list[int]:
                return measured.answer(session, prompt, new_tokens, end_ids).ids

            if not sampling.greedy:
                drawn = ((ids, answer(ids)) for _, ids in first_turns for _ in range(samples))
                distribution.append(_test(target, measured, drawn))
            elif name == AUTOREGRESSIVE:
                reference = {question: answer(ids) for question, ids in first_turns}
            else:
                answers = {question: answer(ids) for question, ids in first_turns}
                greedy.append(compare_answers(target, session, name, first_turns, reference, answers))
            progress.update()
    samplings = [Sampling(temperature, recipe.eval.top_k, recipe.eval.top_p) for temperature in temperatures]
    proof = Proof(greedy, distribution, largest_error([Sampling(1.0), *samplings]), weights, left_out)
    write_json(RunFolder(recipe).eval / artifacts.PROOF, proof.as_json())
    artifacts.update_card(recipe)
    return proof


def compare_answers(
    target: PreTrainedModel,
    session: TargetSession,
    method: str,
    prompts: list[tuple[int | str, list[int]]],
    reference: dict[int | str, list[int]],
    answers: dict[int | str, list[int]],
) -> GreedyProof:
    """Find where a method's greedy answers first differ from the target's, and the gap between the logits there.

    Args:
        session: Session of the target that has room for the longest prompt with its answer in `reference`.
        prompts: (question id, token ids).
        reference: By question id, the target's answers without a draft.
        answers: By question id, the method's answers.
    """
    proof = GreedyProof(method, len(prompts), sum(map(len, answers.values())))
    for question_id, prompt in prompts:
        expected, actual = reference[question_id], answers[question_id]
        position = first_difference(expected, actual)
        if position is not None:
            proof.divergences.append(
                divergence_at(position, target, session, question_id, prompt, expected, actual, blocks_tokens=(1,))
            )
    return proof


@torch.inference_mode()
def _test(target: PreTrainedModel, measured: Arm, drawn: Iterable[tuple[list[int], list[int]]]) -> DistributionProof:
    """Test whether sampled answers, given as (prompt, answer), have the target's distribution."""
    uniforms, impossible = [], 0
    generator, switch = torch.Generator().manual_seed(0), rope_switch(target)
    for prompt, answer in drawn:
        ids = torch.tensor([[*prompt, *answer]], device=target.device)
        logits = target(input_ids=ids, use_cache=False).logits[0]
        if switch is not None and switch < ids.shape[1]:  # earlier tokens were drawn by the angles of a shorter text
            logits = torch.cat([target(input_ids=ids[:, :switch], use_cache=False).logits[0], logits[switch:]])
        logits = logits[len(prompt) - 1 : -1]
        u, excluded = rosenblatt(measured.sampling.probabilities(logits).cpu(), torch.tensor(answer), generator)
        uniforms.append(u)
        impossible += excluded
    u = torch.cat(uniforms)
    statistic, p_value = chi_square_uniform(u)
    return DistributionProof(
        measured.method.name, measured.sampling.temperature, len(u) + impossible, impossible, statistic, p_value
    )


def rosenblatt(p: Tensor, tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """Map tokens [n] to numbers that are uniform on [0, 1] if the tokens were drawn from the rows of p [n, V].

    Args:
        generator: Source of v, which spreads each token over an interval as long as its probability.

    Returns:
        The numbers, fp64, for tokens of probability above 0; and the number of tokens with probability 0.
    """
    p = p.double()
    own = p.gather(1, tokens[:, None])
    possible = own[:, 0] > 0
    below = p.masked_fill(p <= own, 0).sum(-1)
    # Equally likely tokens share one interval, so that their order does not matter.
    step = p.masked_fill(p != own, 0).sum(-1)
    u = below + step * torch.rand(len(p), generator=generator, dtype=torch.float64)
    return u[possible], int((~possible).sum())


def chi_square_uniform(u: Tensor) -> tuple[float, float]:
    """Return the chi-square statistic of u [n] in [0, 1] over `BINS` equal bins, and its p-value."""
    counts = torch.histc(u.clamp(0, 1), bins=BINS, min=0, max=1)
    expected = len(u) / BINS
    statistic = float(((counts - expected) ** 2).sum() / expected) if expected else 0.0
    half_df, half = torch.tensor((BINS - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half_df, half))


def show_proof(proof: Proof) -> None:
    """Print the differences of greedy answers, a table of all tests, and the verdict."""
    for greedy in proof.greedy:
        for each in greedy.divergences:
            console.print(
                f"{greedy.method}, question {each.question_id}, token {each.position}: id {each.found} instead of "
                f"{each.expected}; its logit is {each.gap:.2e} below the largest, numerical error {each.noise:.2e}: "
                + ("a tie" if each.is_tie else "[bold red]no tie[/bold red], so drafting changed the answer")
            )
    rows = [(each.method, each.tokens, each.holds) for each in proof.greedy]
    rows += [
        (f"{each.method} at T = {each.temperature:g}", each.tokens, each.holds(proof.significance))
        for each in proof.distribution
    ]
    print_table(("method", "tokens", "holds"), [(*row, "yes" if holds else "NO") for *row, holds in rows])
    console.print(proof_sentence(proof.as_json()), style="bold" if proof.holds else "bold red", markup=False)
