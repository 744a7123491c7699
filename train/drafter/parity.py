"""Train = decode: what training computes for group t must be what the decoder drafts after prefix t.

A shift by one between the two is the classic mistake of drafters: the loss looks fine and nothing is ever accepted. It
does not depend on the weights, so it is found before the first step: a new drafter, with noise on its initial values
(zeros and ones hide mistakes), reads one example in one training forward, and again in decoding, piece by piece as in
the verification loop.

Shapes: S tokens of the example, G depths, F features, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.decoding.decoders import DrafterDecoder, StepwiseDecoder
from draftsmith.models.target.features import target_features
from draftsmith.models.target.view import target_value

TOLERANCE = 1e-4  # of the logits' standard deviation, in fp32
SHORTEST_ROW_TOKENS = 8
ROW_TOKENS = 128  # more would cost memory (G * S * V logits) and find nothing else
SEED = 0
NOISE_FRAC = 0.1  # of a parameter's root mean square
NOISE_OF_ZEROS = 0.01
COMMITTED_AT_ONCE = (1, 2, 4, 1, 1, 3)  # tokens a round commits: one, and several


@dataclass(frozen=True)
class Difference:
    """Difference between the logits of training and decoding at one depth after one prefix, in standard deviations."""

    prefix_tokens: int
    depth: int
    size: float


def worst_difference(
    drafter: Drafter,
    target: PreTrainedModel,
    input_ids: Tensor,
    prefixes: Sequence[int],
    features_sf: Tensor | None = None,
) -> Difference:
    """Return the largest difference of logits between training (`Drafter.group_logits`) and the drafter's decoder.

    Args:
        drafter: In eval mode, in fp32 or fp64.
        target: Computes the features.
        input_ids: [S] or [1, S], token ids of an example.
        prefixes: Ascending numbers of committed tokens, from 2 to S, after which the decoder drafts.
        features_sf: [S, F], features to use in place of the target's.

    Returns:
        The difference and its place. Its size is inf if one side has NaN, or -inf where the other has not.
    """
    ids_s = input_ids.reshape(-1)
    length = len(ids_s)
    if not prefixes or prefixes[0] < 2 or prefixes[-1] > length or list(prefixes) != sorted(set(prefixes)):
        raise ValueError(f"prefixes {list(prefixes)} must ascend from at least 2 to at most {length}")
    positions_1s = torch.arange(length, device=ids_s.device).unsqueeze(0)
    if features_sf is None:
        features_sf = target_features(target, ids_s[None], None, positions_1s, layers=drafter.feature_layers)[0]
    with torch.inference_mode():
        training_gsv = drafter.group_logits(ids_s[None], features_sf[None], positions_1s)[0].float()
        vocabulary, decoder = training_gsv.shape[-1], drafter.decoder(length)
        prompt = prefixes[0] - 1
        decoder.start(ids_s[:prompt], features_sf[:prompt])
        differences, begin = [], prompt
        for end in prefixes:
            decoder.observe(ids_s[begin:end], features_sf[begin - 1 : end - 1])
            begin = end
            for depth, logits_v in enumerate(drafted_logits(drafter, decoder, ids_s[end:], vocabulary), start=1):
                size = _scaled_difference(training_gsv[depth - 1, end - 1], logits_v)
                differences.append(Difference(end, depth, size))
    return max(differences, key=lambda difference: difference.size)


def perturb(drafter: Drafter, seed: int = SEED) -> None:
    """Add a little noise, drawn with `seed`, to every parameter of a new drafter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            scale = NOISE_FRAC * parameter.square().mean().sqrt().item() or NOISE_OF_ZEROS
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))


@dataclass(frozen=True)
class Parity:
    """Result of comparing a drafter's training with its decoding.

    worst: largest difference of logits. drafts: number of compared prefixes. row_tokens: length of the example.
    parameters: number of trainable parameters.
    """

    worst: Difference
    drafts: int
    row_tokens: int
    parameters: int


def check_parity(
    kind: str,
    options: dict[str, Any],
    target: PreTrainedModel,
    rows: list[TokenizedConversation],
    has_layers: bool = True,
) -> Parity:
    """Compare training with decoding for a new drafter on one example. Converts a half-precision target to fp32.

    If fp32 shows a difference, fp64 decides whether it is rounding: the target is then converted to that.

    Args:
        kind: `drafter.kind` of the recipe.
        options: `drafter.options` of the recipe.
        target: The target model; the drafter may change it.
        rows: Examples to choose from; if none can be used, one is made up.
        has_layers: Whether the target computes the features; if not, random numbers stand in for them.

    Raises:
        UserError: The kind or an option is wrong, or the target is not supported.
    """
    drafter_class = load_drafter_class(kind)
    if target.dtype not in (torch.float32, torch.float64):
        target.float()  # bf16's own rounding is a hundred times the tolerance
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(SEED)
        drafter = drafter_class.from_target(target, options).eval()
    usable = _usable(rows, target.get_input_embeddings().weight.shape[0])
    columns = {"input_ids": [row.input_ids for row in usable], "loss_mask": [row.loss_mask for row in usable]}
    drafter.prepare_draft_vocab(Dataset.from_dict(columns))
    perturb(drafter)
    row = min(usable, key=lambda row: abs(len(row.input_ids) - ROW_TOKENS))
    ids_s = torch.tensor(row.input_ids[:ROW_TOKENS], device=target.device)
    prefixes = loop_like_prefixes(len(ids_s))
    width = len(drafter.feature_layers) * target_value(target.config, "hidden_size")
    generator = torch.Generator().manual_seed(SEED)
    drawn_sf = None if has_layers else torch.randn(len(ids_s), width, generator=generator).to(ids_s.device)
    worst = worst_difference(drafter, target, ids_s, prefixes, drawn_sf)
    if worst.size > TOLERANCE and target.device.type != "mps":  # which has no fp64
        target.double()
        drafter.double().attach(target)  # again: what an earlier `attach` made is in fp32
        drawn_sf = None if drawn_sf is None else drawn_sf.double()
        worst = worst_difference(drafter, target, ids_s, prefixes, drawn_sf)
    parameters = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    return Parity(worst, len(prefixes), len(ids_s), parameters)


def _usable(rows: list[TokenizedConversation], vocabulary: int) -> list[TokenizedConversation]:
    """Return the rows that are long enough and that the target can read; a made-up one if there is none."""
    usable = [
        row
        for row in rows
        if len(row.input_ids) >= SHORTEST_ROW_TOKENS and 0 <= min(row.input_ids) <= max(row.input_ids) < vocabulary
    ]
    half = ROW_TOKENS // 4
    return usable or [TokenizedConversation([token % vocabulary for token in range(2 * half)], [0] * half + [1] * half)]


def loop_like_prefixes(length: int) -> list[int]:
    """Return prefix lengths of an example as in decoding: half of it as prompt, then one or more tokens a round."""
    prefixes, committed = [max(2, length // 2 + 1)], cycle(COMMITTED_AT_ONCE)
    while (following := prefixes[-1] + next(committed)) <= length:
        prefixes.append(following)
    return prefixes


def drafted_logits(
    drafter: Drafter, decoder: DrafterDecoder | StepwiseDecoder, following_s: Tensor, vocabulary: int
) -> Iterator[Tensor]:
    """Yield the decoder's logits [V] at depths 1, 2, ...; a stepwise decoder reads the true tokens `following_s`.

    Raises:
        TypeError: The decoder has `begin`, and lacks other members of a `StepwiseDecoder`.
        ValueError: The decoder drafts another number of depths than its config has.
    """
    num_depths, all_tokens = drafter.config.num_depths, partial(decoder.columns.widened, elsewhere=-torch.inf)
    if not isinstance(decoder, StepwiseDecoder):
        if hasattr(decoder, "begin"):
            missing = [name for name in ("num_depths", "expand") if not hasattr(decoder, name)]
            raise TypeError(f"{type(decoder).__name__} has begin() as a StepwiseDecoder, but no {', '.join(missing)}")
        drafted_gv = decoder.draft()
        if len(drafted_gv) != num_depths:
            raise ValueError(f"draft() gives {len(drafted_gv)} depths, config.num_depths is {num_depths}")
        yield from all_tokens(drafted_gv)
        return
    yield all_tokens(decoder.begin()[0])
    parent = 0
    for token in following_s[: min(num_depths, decoder.num_depths) - 1].tolist():
        # The true token's sibling comes first: it must change nothing for the true one.
        yield all_tokens(decoder.expand([(token + 1) % vocabulary, token], [parent, parent])[1])
        parent += 2


def _scaled_difference(training_v: Tensor, decoded_v: Tensor) -> float:
    decoded_v = decoded_v.to(training_v)
    finite = torch.isfinite(training_v)
    same_elsewhere = torch.equal(training_v[~finite], decoded_v[~finite])  # False for NaN
    scale = training_v[finite].std()
    size = ((training_v - decoded_v)[finite].abs().max() / scale).item() if finite.any() else float("inf")
    return size if same_elsewhere and size == size else float("inf")
