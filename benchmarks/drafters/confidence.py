"""What does DSpark's confidence head know of a drafted token that its probability does not say already?

    python benchmarks/drafters/confidence.py embedded-dspark --json docs/results/drafters/confidence.json

The target answers the recipe's questions (T = 0). At every place of its answers and every depth, given the true tokens
before, the drafter's most likely tokens stand to be accepted: one of them at most is what the target says. Each way to
say how likely is scored by its mean log loss, in nats a token, less being better:

    q          the drafter's own probability
    q x c      times the confidence head's, the expected sum of min(p, q) over all tokens
    fitted     a logistic regression on log q and the logit of q; and on these, c and log c: what there is to know

Beside it, by c: how often the drafter's first token is right, and each of its others.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.sources.questions import load_questions
from draftsmith.eval.bench.arms import load_models
from draftsmith.eval.bench.spec_bench import first_turn_prompts
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.models.drafters.dspark import DSparkDrafter
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.recipes.errors import UserError, exit_with_one_sentence
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.progress import progress_bar
from draftsmith.recipes.results import write_result

BRANCH = 8  # of a row, as in an adaptive tree
LEAST, MOST = 1e-6, 1 - 1e-6
ENDS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of c


@torch.inference_mode()
def candidates(drafter: DSparkDrafter, target: Any, ids: Tensor, answer_from: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of [1, S] whose answer begins at `answer_from`: q [N, BRANCH] of each row's most likely tokens, which is right
    [N, BRANCH], and c [N]."""
    assert drafter.markov_head is not None
    features = target_features(target, ids, layers=drafter.feature_layers)
    found = []
    for depth, hidden_sd in enumerate(drafter.stream_hidden(ids, features)[0]):
        # The row at s drafts the token at s + depth + 1 and knows the one before it.
        rows = slice(max(0, answer_from - depth - 1), ids.shape[1] - depth - 1)
        before, right = ids[0, rows.start + depth : -1], ids[0, rows.start + depth + 1 :]
        logits = drafter.logits_of(hidden_sd[rows]).float() + drafter.markov_head(before).float()
        q, columns = logits.softmax(-1).topk(BRANCH, dim=-1)
        sure = drafter.confidence_head(drafter.norm(hidden_sd[rows]), drafter.markov_head.markov_w1(before)).sigmoid()
        found.append((q, drafter.columns.tokens_of(columns) == right[:, None], sure))
    return joined(found)


def joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    q, right, sure = (torch.cat(column) for column in zip(*parts, strict=True))
    return q, right, sure


def log_loss(said: Tensor, right: Tensor) -> float:
    return float(F.binary_cross_entropy(said.clamp(LEAST, MOST).double(), right.double()))


def fitted_log_loss(features: list[Tensor], right: Tensor) -> float:
    """Of the logistic regression that fits these best, and an intercept."""
    columns = torch.stack([torch.ones_like(features[0]), *features], dim=1).double()
    weights, labels = torch.zeros(columns.shape[1], dtype=torch.float64, requires_grad=True), right.double()
    optimizer = torch.optim.LBFGS([weights], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(columns @ weights, labels)
        value.backward()
        return value

    optimizer.step(loss)
    return float(loss().detach())


def figures_of(q: Tensor, right: Tensor, sure: Tensor) -> dict[str, Any]:
    """q and right [N, BRANCH], c [N]."""
    each = sure[:, None].expand_as(q)
    flat_q, flat_c = (part.flatten().clamp(LEAST, MOST) for part in (q, each))
    flat_right = right.flatten()
    own, beside = [flat_q.log(), flat_q.logit()], [flat_c, flat_c.log()]
    by_confidence = []
    for low, high in itertools.pairwise(ENDS):
        here = (sure >= low) & ((sure < high) | (high == ENDS[-1]))
        if here.any():
            parts = {"first": slice(0, 1), "others": slice(1, None)}
            by_confidence.append(
                {"from": low, "to": high, "rows": int(here.sum())}
                | {f"{name}_q": float(q[here, part].mean()) for name, part in parts.items()}
                | {f"{name}_right": float(right[here, part].double().mean()) for name, part in parts.items()}
            )
    return {
        "rows": len(sure),
        "log_loss": {
            "q": log_loss(flat_q, flat_right),
            "q_times_c": log_loss(flat_q * flat_c, flat_right),
            "fitted_to_q": fitted_log_loss(own, flat_right),
            "fitted_to_q_and_c": fitted_log_loss([*own, *beside], flat_right),
        },
        "by_confidence": by_confidence,
    }


@exit_with_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="embedded-dspark", help="whose trained drafter to ask")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--questions", type=int, default=21)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.overrides)
    target, tokenizer, drafters = load_models(recipe)
    (drafter,) = drafters.values()
    if not isinstance(drafter, DSparkDrafter) or not drafter.config.confidence_weight:
        raise UserError(f"the drafter of {recipe.name} has no confidence head: name a recipe of kind `dspark`")
    questions, limit = load_questions(recipe.eval.questions), longest_sequence_tokens(target)
    asked = first_turn_prompts(tokenizer, questions, options.questions, options.new_tokens, limit)
    length, found = max(len(prompt) for _, prompt in asked) + options.new_tokens, []
    with TargetSession(target, length) as session, progress_bar(len(asked), "answer", "question") as progress:
        for _, prompt in asked:
            answer = generate(session, Autoregressive(), prompt, Sampling(), options.new_tokens).ids
            ids = torch.tensor([[*prompt, *answer]], device=target.device)
            found.append(candidates(drafter, target, ids, len(prompt)))
            progress.update()
    figures = figures_of(*joined(found))
    for way, nats in figures["log_loss"].items():
        print(f"{way.replace('_', ' ')}: {nats:.4f} nats a token")
    for part in figures["by_confidence"]:
        print(
            f"c from {part['from']} to {part['to']}, {part['rows']} rows: the first token is right in "
            f"{part['first_right']:.0%} (q {part['first_q']:.0%}), each other in {part['others_right']:.1%} "
            f"(q {part['others_q']:.1%})"
        )
    if options.json:
        write_result(options.json, {"recipe": recipe.name} | figures)


if __name__ == "__main__":
    main()
