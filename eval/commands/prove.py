"""`draftsmith prove`: evidence, on the user's own target and drafter, that nothing but the speed changes.

Of lossless methods; those with a lenience below 1 are left out and named.

1. Greedy identity: every method's greedy answers against the loop's without a draft. At the first difference the gap
   between the target's two largest logits tells a numerical tie from a bug: a gap within the noise between two correct
   ways of computing the same logits (token by token with a cache, and all at once) may fall either way.
2. Distribution: sampled answers against the target's probabilities, by Rosenblatt's transform. If x is drawn from p,
   u = p(tokens more likely than x) + v p(x) with v uniform is uniform on [0, 1], at every position whatever came
   before. So all tokens of all answers make one chi-square test, for any vocabulary and any prompts; the baseline's own
   answers pass through the same test as a control.
3. Enumeration: the exact distribution of the verifier's result over everything that chance can do (`enumeration.py`).

Shapes: P prompt, n answer tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.eval.bench.arms import Arm, load_models, make_arms
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.commands.evaluate import (
    PROOF,
    drafter_weights,
    update_card,
    with_tuned_trees,
)
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.enumeration import largest_error
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.trees.tree import root_only
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.schema import Recipe

BINS = 20
SIGNIFICANCE = 1e-3  # of all distribution tests together
TIE_NOISE = 2.0  # a gap of up to so many times the noise is a tie
ENUMERATION_TOLERANCE = 1e-9
DEFAULT_TEMPERATURE = 1.0  # where the recipe only decodes greedily


@dataclass
class Divergence:
    """Where a greedy answer first differed. `gap`: between the two largest logits; `noise`: see the module."""

    question_id: int | str
    position: int
    expected: int
    found: int
    gap: float
    noise: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= TIE_NOISE * self.noise


@dataclass
class GreedyProof:
    method: str
    prompts: int
    tokens: int
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(divergence.is_tie for divergence in self.divergences)


@dataclass
class DistributionProof:
    """`impossible`: tokens that the target gives no probability at all."""

    method: str
    temperature: float
    tokens: int
    impossible: int
    chi_square: float
    p_value: float

    def holds(self, significance: float) -> bool:
        return self.impossible == 0 and self.p_value >= significance


@dataclass
class Proof:
    """All evidence; `holds` is what the exit code says."""

    greedy: list[GreedyProof]
    distribution: list[DistributionProof]
    enumeration_error: float
    drafter_weights: list[str | None]  # SHA-256, of what this is the proof of
    left_out: list[str] = field(default_factory=list)  # methods with lenience: nobody says that they are lossless

    @property
    def significance(self) -> float:
        """Of one distribution test."""
        return SIGNIFICANCE / max(1, len(self.distribution))

    @property
    def holds(self) -> bool:
        return (
            all(proof.holds for proof in self.greedy)
            and all(proof.holds(self.significance) for proof in self.distribution)
            and self.enumeration_error <= ENUMERATION_TOLERANCE
        )

    def as_json(self) -> dict[str, Any]:
        """With the verdicts beside the figures."""
        return {
            "holds": self.holds,
            "greedy": [
                {**asdict(proof), "holds": proof.holds, "ties": sum(d.is_tie for d in proof.divergences)}
                for proof in self.greedy
            ],
            "distribution": [{**asdict(proof), "holds": proof.holds(self.significance)} for proof in self.distribution],
            "significance": self.significance,
            "enumeration_error": self.enumeration_error,
            "drafter_weights": self.drafter_weights,
            "left_out": self.left_out,
        }

    def show(self, console: Console) -> None:
        table = Table(title="greedy identity", title_justify="left")
        for column in ("method", "prompts", "tokens", "different answers", "numerical ties", "holds"):
            table.add_column(column)
        for greedy in self.greedy:
            ties = sum(divergence.is_tie for divergence in greedy.divergences)
            cells = (greedy.prompts, greedy.tokens, len(greedy.divergences), ties)
            table.add_row(greedy.method, *map(str, cells), _yes(greedy.holds))
        console.print(table)
        for greedy in self.greedy:
            for found in greedy.divergences:
                console.print(
                    f"{greedy.method}, question {found.question_id}, token {found.position}: {found.found} instead of "
                    f"{found.expected}; the two largest logits are {found.gap:.2e} apart, noise {found.noise:.2e}: "
                    + ("a tie" if found.is_tie else "[bold red]a bug[/bold red]")
                )
        table = Table(title="distribution of sampled tokens", title_justify="left")
        for column in ("method", "T", "tokens", "impossible", f"chi-square ({BINS - 1} df)", "p-value", "holds"):
            table.add_column(column)
        for proof in self.distribution:
            figures = (f"{proof.temperature:g}", str(proof.tokens), str(proof.impossible), f"{proof.chi_square:.1f}")
            verdict = _yes(proof.holds(self.significance))
            table.add_row(proof.method, *figures, f"{proof.p_value:.3f}", verdict)
        console.print(table)
        console.print(f"verifier, by enumeration: largest error {self.enumeration_error:.1e}")
        if self.left_out:
            console.print(f"not lossless by their lenience, so left out: {', '.join(self.left_out)}", style="bold")
        console.print("[bold]proved[/bold]" if self.holds else "[bold red]NOT PROVED[/bold red]")


def prove(recipe: Recipe, prompts: int = 16, samples: int = 4, new_tokens: int = 48) -> Proof:
    """Collect the evidence and write it to `runs/<name>/eval/proof.json`.

    Args:
        prompts: First turns of that many questions.
        samples: Sampled answers to each prompt.
        new_tokens: Of every answer at most.

    Raises:
        UserError: There is no trained drafter, no lossless method, or no question that fits the target.
    """
    left_out = [method.name for method in recipe.eval.methods if method.lenience < 1]
    weights = drafter_weights(recipe)
    recipe = _lossless_only(with_tuned_trees(recipe))
    target, tokenizer, drafters = load_models(recipe)
    limit = longest_sequence_tokens(target)
    asked = first_turn_prompts(tokenizer, load_questions(recipe.eval.questions), prompts, new_tokens, limit)
    end_ids = frozenset(answer_end_ids(target, tokenizer))
    length = max(len(ids) for _, ids in asked) + new_tokens
    temperatures = [t for t in recipe.eval.temperatures if t > 0] or [DEFAULT_TEMPERATURE]
    evaluation = recipe.eval.model_copy(update={"temperatures": [0.0, *temperatures]})
    arms = make_arms(recipe.model_copy(update={"eval": evaluation}), drafters, target, tokenizer, length)
    greedy: list[GreedyProof] = []
    distribution: list[DistributionProof] = []
    reference: dict[int | str, list[int]] = {}
    with TargetSession(target, length) as session, tqdm(total=len(arms), desc="prove", unit="method") as progress:
        for arm in arms:
            session.read_layers(arm.feature_layers)
            arm.generator.manual_seed(recipe.seed)
            if arm.sampling.greedy:
                answers = {q: _answer(session, arm, ids, new_tokens, end_ids) for q, ids in asked}
                if arm.method.name == AUTOREGRESSIVE:
                    reference = answers
                else:
                    greedy.append(_compare(target, session, arm.method.name, asked, reference, answers))
            else:
                drawn = (
                    (ids, _answer(session, arm, ids, new_tokens, end_ids)) for _, ids in asked for _ in range(samples)
                )
                distribution.append(_test(target, arm, drawn))
            progress.update()
    samplings = [Sampling(temperature, recipe.eval.top_k, recipe.eval.top_p) for temperature in temperatures]
    proof = Proof(greedy, distribution, largest_error([Sampling(1.0), *samplings]), weights, left_out)
    write_atomically(RunFolder(recipe).eval / PROOF, json.dumps(proof.as_json(), indent=2) + "\n")
    update_card(recipe)
    return proof


def _lossless_only(recipe: Recipe) -> Recipe:
    methods = [method for method in recipe.eval.methods if method.lenience == 1]
    if recipe.eval.methods and not methods:
        raise UserError(
            "every method of eval.methods has a lenience below 1, which is not lossless, so there is nothing to prove: "
            "add a method without lenience"
        )
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": methods})})


def _answer(session: TargetSession, arm: Arm, prompt: list[int], new_tokens: int, end_ids: frozenset[int]) -> list[int]:
    return generate(session, arm.method, prompt, arm.sampling, new_tokens, end_ids, arm.generator).ids


def _compare(
    target: PreTrainedModel,
    session: TargetSession,
    method: str,
    asked: list[tuple[int | str, list[int]]],
    reference: dict[int | str, list[int]],
    answers: dict[int | str, list[int]],
) -> GreedyProof:
    proof = GreedyProof(method, len(asked), sum(map(len, answers.values())))
    for question_id, prompt in asked:
        expected, found = reference[question_id], answers[question_id]
        if expected == found:
            continue
        pairs = enumerate(zip(expected, found, strict=False))
        position = next((index for index, (a, b) in pairs if a != b), min(len(expected), len(found)) - 1)
        gap, noise = _gap_and_noise(target, session, prompt, expected[:position])
        proof.divergences.append(Divergence(question_id, position, expected[position], found[position], gap, noise))
    return proof


@torch.inference_mode()
def _gap_and_noise(
    target: PreTrainedModel, session: TargetSession, prompt: list[int], answer: list[int]
) -> tuple[float, float]:
    """Of the token after `answer`: how far apart its two largest logits are, and how exactly they are known."""
    at_once = target(input_ids=torch.tensor([[*prompt, *answer]], device=target.device), use_cache=False)
    logits_v = at_once.logits[0, -1].float()
    step = session.prefill(prompt)
    for token in answer:
        step = session.forward_tree(root_only(token))
        session.commit([0])
    top = logits_v.topk(2)
    noise = (step.logits[-1].float() - logits_v)[top.indices].abs().max()
    return float(top.values[0] - top.values[1]), float(noise)


@torch.inference_mode()
def _test(target: PreTrainedModel, arm: Arm, drawn: Iterable[tuple[list[int], list[int]]]) -> DistributionProof:
    uniforms, impossible = [], 0
    generator = torch.Generator().manual_seed(0)
    for prompt, answer in drawn:
        ids = torch.tensor([[*prompt, *answer]], device=target.device)
        logits = target(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        u, excluded = rosenblatt(arm.sampling.probabilities(logits).cpu(), torch.tensor(answer), generator)
        uniforms.append(u)
        impossible += excluded
    u = torch.cat(uniforms)
    statistic, p_value = chi_square_uniform(u)
    return DistributionProof(
        arm.method.name, arm.sampling.temperature, len(u) + impossible, impossible, statistic, p_value
    )


def rosenblatt(p: Tensor, tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """Uniform numbers, if tokens [n] were drawn from the rows of p [n, V]; and how many had no probability.

    Args:
        generator: Breaks up the step that each token's own probability makes.
    """
    p = p.double()
    own = p.gather(1, tokens[:, None])
    possible = own[:, 0] > 0
    below = p.masked_fill(p <= own, 0).sum(-1)
    # Equally likely tokens share one step, so that their order does not matter.
    step = p.masked_fill(p != own, 0).sum(-1)
    u = below + step * torch.rand(len(p), generator=generator, dtype=torch.float64)
    return u[possible], int((~possible).sum())


def chi_square_uniform(u: Tensor) -> tuple[float, float]:
    """The statistic of u [n] in [0, 1] over `BINS` equal bins, and its p-value."""
    counts = torch.histc(u.clamp(0, 1), bins=BINS, min=0, max=1)
    expected = len(u) / BINS
    statistic = float(((counts - expected) ** 2).sum() / expected) if expected else 0.0
    half_df, half = torch.tensor((BINS - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half_df, half))


def _yes(holds: bool) -> str:
    return "yes" if holds else "[bold red]NO[/bold red]"
