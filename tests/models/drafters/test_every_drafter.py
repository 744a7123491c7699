"""The invariants of every kind of drafter; a new file in `models/drafters/` is tested automatically.

Greedy identity (1), train = decode (3), no leak (4), save and load (8).
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.drafter_cases import (
    BY_GROUPS,
    CASES,
    TARGET_LAYERS,
    drafted_logits,
    group_hidden,
    target_and_drafter,
)
from support.half_right import tree_method
from support.tiny_models import EXPERTS, LENGTH, VOCABULARY, capped_target, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import drafter_kinds, load_drafter, load_drafter_class
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.drafters.dflash import DFlashDrafter
from draftsmith.models.drafters.dflash2 import DFlash2Drafter
from draftsmith.models.groups.layers import SUPPORTED_MODEL_TYPES
from draftsmith.models.groups.layout import depth_labels
from draftsmith.models.loss import LOSSES, loss_weights, smooth_l1
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.architectures import logit_shape
from draftsmith.models.target.features import target_features
from draftsmith.train.drafter.rows import collate_right_padded, pack_documents

IDS = [f"{kind}-{index}" for index, (kind, _) in enumerate(CASES)]
DEFAULTS = [(kind, dict[str, Any]()) for kind in drafter_kinds()]
WITH_ATTENTION = [k for k in drafter_kinds() if "attention" in load_drafter_class(k).config_class.Options.model_fields]
every_drafter = pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
# With the variants of options in `make test` only.
KINDS = [case if case in DEFAULTS else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
every_kind = pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)


@pytest.mark.parametrize(("kind", "options"), [*CASES, ("parallel", {"num_masks": 0, "init": "random"})])
def test_training_equals_decoding(kind: str, options: dict[str, Any]) -> None:
    target, drafter = target_and_drafter(kind, options)
    check_training_equals_decoding(target, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in SUPPORTED_MODEL_TYPES if name != "llama"])
@pytest.mark.parametrize("kind", ["dflash", "eagle", "eagle3", "medusa2", "parallel", "pass_embeddings"])
def test_every_kind_of_target(kind: str, model_type: str, tmp_path: Path) -> None:
    """Targets with biases, QK norms, fused projections or norms after the attention, for each use of their layers."""
    target = tiny_target(model_type, num_hidden_layers=TARGET_LAYERS)
    drafter = tiny_drafter_of(kind, target)
    check_training_equals_decoding(target, drafter)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in drafter.state_dict().items())


# Kinds with own decoder layers, and the model type of these for a target without suitable ones.
OTHER_LAYERS = [(kind, "qwen3") for kind in ("dflash", "dspark")] + [
    (kind, layers)
    for kind in ("draft_model", "eagle", "eagle3", "eagle_parallel", "hydra", "parallel", "peagle")
    for layers in ("llama", "qwen3")
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "model_type"), [*zip(OTHER_LAYERS, itertools.cycle(EXPERTS))])
def test_layers_of_another_model_type(case: tuple[str, str], model_type: str, tmp_path: Path) -> None:
    """For a target of experts: dense layers with its width, heads and RoPE, decoded as trained, saved and loaded."""
    kind, layers = case
    target = tiny_target(model_type, num_hidden_layers=TARGET_LAYERS, **EXPERTS[model_type])
    options: dict[str, Any] = {"prefix_attention": True} if kind == "hydra" else {}
    if layers == "qwen3" and kind not in ("dflash", "dspark"):
        options["layers"] = "qwen3"
    drafter = tiny_drafter_of(kind, target, **options)
    names = set(drafter.state_dict())
    assert any("q_norm" in name for name in names) == (layers == "qwen3")
    assert not any("expert" in name for name in names)
    check_training_equals_decoding(target, drafter)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target)
    assert loaded.config.layers == layers
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in drafter.state_dict().items())


def check_training_equals_decoding(target: PreTrainedModel, drafter: Drafter) -> None:
    """Check that group t's logits in one training forward equal those drafted after prefix t in irregular chunks."""
    ids = random_batch(target, 1)["input_ids"]
    features = target_features(target, ids, layers=drafter.feature_layers)
    with torch.no_grad():
        training = drafter.group_logits(ids, features)[0]
    assert training.shape == (drafter.config.num_depths, LENGTH, VOCABULARY)
    decoder = drafter.decoder(LENGTH)
    for end in (2, 1):  # tokens of the prompt; the second with the same decoder
        decoder.start(ids[0, :end], features[0, :end])
        for chunks in ((1,), (1,), (2, 1), (4,), (1, 1, 1)):
            for size in chunks:
                decoder.observe(ids[0, end : end + size], features[0, end - 1 : end + size - 1])
                end += size
            drafted = drafted_logits(drafter, decoder, ids[0], end - 1)
            expected = training[: len(drafted), end - 1]
            torch.testing.assert_close(drafted, expected, atol=1e-5, rtol=1e-5)


# Kinds that draft along paths, and what makes others do so.
ALONG_PATHS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("dflash2", "draft_model", "dspark", "eagle", "eagle3", "hydra")),
    ("eagle", {"sliding_window": 7}),
    ("hydra", {"prefix_attention": True}),
    ("parallel", {"markov_rank": 5}),
]


@pytest.mark.parametrize(("kind", "options"), ALONG_PATHS)
def test_tree_equals_its_paths(kind: str, options: dict[str, Any]) -> None:
    """Every node has the logits of its path alone, whatever the calls and the order of nodes.

    The decoder drafts all of them, so that a tree that left a trace would show.
    """
    target, drafter = target_and_drafter(kind, options)
    batch = random_batch(target, 1, drafter=drafter)
    ids, features, decoder = batch["input_ids"][0], batch["features"][0].detach(), drafter.decoder(LENGTH)

    def grow(*levels: tuple[list[int], list[int]]) -> list[Tensor]:
        decoder.start(ids[:5], features[:5])
        decoder.observe(ids[5:7], features[4:6])
        return [*decoder.begin(), *(logits for level in levels for logits in decoder.expand(*level).clone())]

    # Nodes 1, 2, 3 below the root; 4 below 2; then in one call 5 below 1 and 6 below the root; 7 below 4.
    root, *nodes = grow(([7, 8, 9], [0, 0, 0]), ([10], [2]), ([11, 12], [1, 0]), ([20], [4]))
    paths = [[7], [8], [9], [8, 10], [7, 11], [12], [8, 10, 20]]
    for logits, path in zip(nodes, paths, strict=True):
        chain = grow(*(([token], [node]) for node, token in enumerate(path)))
        torch.testing.assert_close(chain[0], root, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, chain[-1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(nodes[3], nodes[4], atol=1e-2)


@pytest.mark.parametrize("kind", WITH_ATTENTION)
def test_a_window_longer_than_the_text_changes_no_bit(kind: str) -> None:
    """In the loss, its gradients and the drafts; one that is shorter changes all three."""
    options: dict[str, Any] = {"prefix_attention": True} if kind == "hydra" else {}
    results, state = [], None
    for window in (None, 2 * LENGTH, 7):
        target, drafter = target_and_drafter(kind, {**options, "sliding_window": window})
        state = drafter.state_dict() if state is None else state
        drafter.eval().load_state_dict(state)
        batch = random_batch(target, drafter=drafter)
        loss = drafter(**batch).loss
        loss.backward()
        gradient = torch.cat([each.grad.flatten() for each in drafter.parameters() if each.grad is not None])
        decoder = drafter.decoder(LENGTH)
        decoder.start(batch["input_ids"][0, :9], batch["features"][0, :9])
        decoder.observe(batch["input_ids"][0, 9:10], batch["features"][0, 8:9])
        results.append((loss.detach(), gradient, drafted_logits(drafter, decoder, batch["input_ids"][0], 9)))
    without, longer, shorter = results
    assert [torch.equal(*pair) for pair in zip(without, longer, strict=True)] == [True] * 3
    assert [torch.equal(*pair) for pair in zip(without, shorter, strict=True)] == [False] * 3


@every_drafter
def test_no_leak(kind: str, options: dict[str, Any]) -> None:
    """A token changes no depth of a group that may not see it; a feature only later groups; the last one, none."""
    target, drafter = target_and_drafter(kind, options)
    batch = random_batch(target, drafter=drafter)
    ids, features, u = batch["input_ids"], batch["features"], 8
    changed_ids, changed_features = ids.clone(), features.clone()
    changed_ids[:, u] = (changed_ids[:, u] + 1) % VOCABULARY
    changed_features[:, u] += 1.0
    with torch.no_grad():
        before = drafter.group_logits(ids, features)
        token_changed = drafter.group_logits(changed_ids, features)
        feature_changed = drafter.group_logits(ids, changed_features)
    stepwise = isinstance(drafter.decoder(LENGTH), StepwiseDecoder)
    for j in range(drafter.config.num_depths):
        # Depth j+1 of group t reads tokens up to x_t, and the draft tokens x_{t+1..t+j} if it reads draft tokens.
        first_group = u - j if stepwise else u
        assert torch.equal(before[:, j, :first_group], token_changed[:, j, :first_group])
        assert torch.equal(before[:, j, : u + 1], feature_changed[:, j, : u + 1])
    reads_none = kind in ("pass_embeddings", "draft_model") or options.get("inputs") == "embedding"
    if not reads_none:
        assert not torch.equal(before[:, :, u + 1], feature_changed[:, :, u + 1])
    read = [name for name in ("features", "teacher_features") if name in batch]
    without_last = {name: torch.nn.functional.pad(batch[name][:, :-1], (0, 0, 0, 1)) for name in read}
    assert torch.equal(drafter.eval()(**batch).loss, drafter(**{**batch, **without_last}).loss)


@every_kind
def test_greedy_identity(kind: str, options: dict[str, Any]) -> None:
    """A tree of candidates; and one kind of each decoder also drafts the other trees."""
    target, drafter = target_and_drafter(kind, options)
    target, drafter = target.double(), drafter.double()
    has_all = kind in ("dflash", "eagle", "medusa") and not options
    trees = ("chain", "static", "best_first") if has_all else ("best_first",)
    greedy, prompt = Sampling(), [5, 9, 33, 12, 40, 7]
    with TargetSession(target, 32, drafter.feature_layers) as session:
        decoder = drafter.decoder(32)
        plain = generate(session, Autoregressive(), prompt, greedy, 20)
        for tree in trees:
            assert generate(session, tree_method(decoder, tree), prompt, greedy, 20).ids == plain.ids, tree


@every_kind
def test_save_and_load_keep_the_logits_without_the_targets_weights(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    target, drafter = target_and_drafter(kind, options)
    drafter.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())
    assert saved == set(drafter.state_dict())
    # Weights trained inside the target are saved with the drafter.
    of_the_target = {p.data_ptr() for p in target.parameters() if not p.requires_grad}
    assert not any(parameter.data_ptr() in of_the_target for parameter in drafter.parameters())
    batch = random_batch(target, drafter=drafter)
    with torch.no_grad():
        expected = drafter.group_logits(batch["input_ids"], batch["features"])
        loaded = load_drafter(tmp_path, target)
        found = loaded.state_dict()
        assert all(torch.equal(found[name], value) for name, value in drafter.state_dict().items())
        # Loaded memory may be aligned differently, which changes the rounding of products on some processors.
        for parameter in loaded.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(loaded.group_logits(batch["input_ids"], batch["features"]), expected)


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        *((*case, dtype) for case in DEFAULTS for dtype in (torch.bfloat16, torch.float16)),
        *(pytest.param(*c, torch.bfloat16, marks=pytest.mark.slow) for c in CASES if c not in DEFAULTS),
    ],
)
def test_autocast_in_bf16(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """It has nearly the fp32 loss, also with features in fp16, which have no common dtype with bf16."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS).to(dtype)
    drafter = tiny_drafter_of(kind, target, **options)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    batch = random_batch(target, drafter=drafter)
    assert batch["features"].dtype == dtype
    plain = drafter(**batch).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = drafter(**batch).loss
    mixed.backward()
    torch.testing.assert_close(mixed, plain, atol=0.05, rtol=0.05)


@every_kind
def test_drafter_is_loaded_in_the_targets_dtype(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Draft logits are in fp32, and finite for all candidates."""
    target = tiny_target(num_hidden_layers=TARGET_LAYERS).bfloat16()
    drafter = tiny_drafter_of(kind, target, **options)
    batch = random_batch(target, drafter=drafter)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, tiny_target(num_hidden_layers=TARGET_LAYERS).bfloat16())
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    decoder = loaded.decoder(LENGTH)
    ids_s, features_sf = batch["input_ids"][0], batch["features"][0].detach()
    decoder.start(ids_s[:8], features_sf[:8])
    decoder.observe(ids_s[8:9], features_sf[7:8])
    drafted = drafted_logits(loaded, decoder, ids_s, 8)
    assert drafted.dtype == torch.float32
    candidates = options.get("draft_vocab_size", VOCABULARY)
    candidates = getattr(loaded.config, "selector_top_k", candidates)
    assert torch.isfinite(drafted).sum(-1).tolist() == [candidates] * len(drafted)


@every_kind
def test_every_parameter_gets_a_gradient_and_the_target_none(kind: str, options: dict[str, Any]) -> None:
    """Padding does not change the loss; without labels the loss is 0 and no gradient is NaN."""
    target, drafter = target_and_drafter(kind, options)
    batch = random_batch(target, drafter=drafter)
    padded = {name: torch.nn.functional.pad(x, (0, 0, 0, 5) if x.ndim == 3 else (0, 5)) for name, x in batch.items()}
    with torch.no_grad():
        torch.testing.assert_close(drafter(**padded).loss, drafter(**batch).loss)
    output = drafter.train()(**batch)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert output.depth_count is not None
    assert (output.depth_count > 0).all()
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in target.parameters() if not parameter.requires_grad)
    drafter.zero_grad()
    batch = random_batch(target, drafter=drafter)
    output = drafter(**{**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])})
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)


def logits_of_head(drafter: Drafter, ids: Tensor, features: Tensor) -> Tensor:
    """Return the logits [B, G, S, V] for the loss, before a selector re-ranks them."""
    plain = DFlashDrafter if isinstance(drafter, DFlash2Drafter) else type(drafter)
    return plain.group_logits(drafter, ids, features)


def reference_loss(target: PreTrainedModel, drafter: Drafter, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss label by label from the logits of all groups: no chunks, no active rows, weights as defined."""
    config, ids, features, shape = drafter.config, batch["input_ids"], batch["features"], logit_shape(target)
    logits, shares = logits_of_head(drafter, ids, features), config.options.depth_shares
    labels = depth_labels(ids, batch["loss_mask"], config.num_depths)
    drafted = drafter.group_logits(ids, features).argmax(-1)
    kept = list(range(VOCABULARY)) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    teacher = batch.get("teacher_features", features)
    hidden = group_hidden(drafter, ids, features) if "class_weight" in config.to_dict() else None
    selector = getattr(drafter, "candidate_selector", None)
    needs_normed = selector is not None or drafter.needs_acceptance
    normed = drafter.norm(group_hidden(drafter, ids, features)) if needs_normed else None
    gates = None if selector is None else selector.hidden_projection(normed)
    says = drafter.confidence_head if drafter.needs_acceptance else None
    until_first_error = getattr(config, "until_first_error", False)
    means: list[list[Tensor]] = [[] for _ in shares]  # losses through the head, by depth
    further: list[list[Tensor]] = [[] for _ in shares]  # EAGLE's regression and the selector's loss
    total = logits.new_zeros(())
    for b, t in itertools.product(range(len(ids)), range(LENGTH)):
        right, kept_on = list[bool](), 1.0
        for j, label in enumerate(labels[b, :, t].tolist()):
            if label == -100:
                break
            row, read = logits[b, j, t, kept][None], config.loss != "ce" or label in kept
            place = torch.tensor([kept.index(label) if label in kept else 0])
            p_all = shape(target.lm_head(teacher[b, t + j])) if drafter.needs_teacher else logits[b, j, t]
            counts = {"ce": float(label in kept)}
            distance = getattr(config, "class_weight", 1.0) * sum(
                weight
                * counts.get(name, 1.0)
                * LOSSES[name](row.log_softmax(-1), place, p_all[kept][None].log_softmax(-1))[0]
                for name, weight in loss_weights(config.loss).items()
            )
            if until_first_error:
                kept_on = float(all(right))
            right.append(int(drafted[b, j, t]) == label)
            means[j] += [kept_on * distance] if read else []
            if hidden is not None:
                further[j].append(kept_on * smooth_l1(hidden[b, j, t], teacher[b, t + j]))
            if selector is not None:
                candidates = [kept[column] for column in row[0].topk(config.selector_top_k).indices.tolist()]
                if label not in candidates:
                    candidates[-1] = label
                context = selector.predecessor_codebook[ids[b, t + j]] * gates[b, j, t]
                scores = logits[b, j, t, candidates] + selector.successor_codebook[candidates] @ context
                nats = -scores.log_softmax(-1)[candidates.index(label)] if label in kept else 0.0 * scores[0]
                further[j].append(kept_on * config.selector_weight * nats.nan_to_num())
            if says is not None and read:
                acceptance = torch.minimum(p_all[kept].softmax(-1), row[0].softmax(-1)).sum().detach()
                before = drafter.markov_head.markov_w1.weight[ids[b, t + j]]
                said = says.proj.weight[0] @ torch.cat([normed[b, j, t], before]) + says.proj.bias[0]
                nats = binary_cross_entropy_with_logits(said, acceptance)
                further[j].append(kept_on * config.confidence_weight * nats)
    for share, of_head, of_others in zip(shares, means, further, strict=True):
        for part in (of_head, of_others):
            total = total + (share * torch.stack(part).mean() if part else 0.0)
    return total


# Losses of a confidence head.
CONFIDENCE = [
    ("dspark", {"markov_rank": 5, "until_first_error": True, "draft_vocab_size": 40}),
    ("dspark", {"markov_rank": 5, "confidence_weight": 0.5, "loss": "ce"}),
]


@pytest.mark.parametrize(("kind", "options"), [*KINDS, *BY_GROUPS, *CONFIDENCE])
def test_the_loss_and_its_gradients(kind: str, options: dict[str, Any]) -> None:
    check_loss(*target_and_drafter(kind, options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("parallel", {"draft_vocab_size": 40, "markov_rank": 5}),
        ("eagle3", {"feature_layers": [0, 1], "draft_vocab_size": 40}),
        ("medusa", {"lm_heads": "shared"}),
        ("dflash", {"block_size": 3, "feature_layers": [0, 1], "sample_from_anchor": True}),
    ],
)
def test_the_loss_for_a_target_that_caps_its_logits(kind: str, options: dict[str, Any]) -> None:
    """The teacher has the target's own distribution, as in decoding."""
    target = capped_target()
    assert target(random_batch(target)["input_ids"]).logits.softmax(-1).amax() < 0.5  # or the cap would do nothing
    check_loss(*target_and_drafter(kind, {**options, "loss": "kl"}, target))


def check_loss(target: PreTrainedModel, drafter: Drafter) -> None:
    """1e-6 in fp64, since transformers' norms and RoPE and the row weights are in fp32."""
    target, drafter = target.double(), drafter.double()
    drafter.training_step = 0  # Medusa-2's heads only
    batch = random_batch(target, drafter=drafter)

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        drafter.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}

    output = drafter(**batch)
    loss, found = output.loss, gradients(output.loss)
    labels = depth_labels(batch["input_ids"], batch["loss_mask"], drafter.config.num_depths)
    logits = logits_of_head(drafter, batch["input_ids"], batch["features"]).detach()
    nats = -logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    known = (labels >= 0) & nats.isfinite()  # labels outside a draft vocabulary have no cross entropy
    assert output.depth_count.tolist() == (labels >= 0).sum((0, 2)).tolist()
    assert output.depth_count_in_head.tolist() == known.sum((0, 2)).tolist()
    drafted = drafter.group_logits(batch["input_ids"], batch["features"]).argmax(-1)
    assert output.depth_correct.tolist() == (drafted == labels).sum((0, 2)).tolist()
    sums = torch.where(known, nats, 0.0).sum((0, 2))
    torch.testing.assert_close(output.depth_loss_sum.double(), sums, atol=1e-5, rtol=1e-5)
    expected = getattr(drafter.config, "heads_weight", 1.0) * reference_loss(target, drafter, batch)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)
    wanted = gradients(expected)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def run_step(drafter: Drafter, target: PreTrainedModel, batches: list[dict[str, Tensor]]) -> tuple[Any, ...]:
    """Return the loss, `DrafterOutput.depth_sums` and gradients of a step whose micro-batches these are."""
    groups = [drafter.groups(each["input_ids"], each["loss_mask"], each.get("position_ids")) for each in batches]
    counts = sum(map(drafter.label_counts, groups)) if len(batches) > 1 else None
    losses, sums = [], []
    for batch in batches:
        ids, positions = batch["input_ids"], batch.get("position_ids")
        features, teacher = drafter.training_features(target, ids, positions)
        output = drafter(ids, features, batch["loss_mask"], positions, teacher, counts)
        output.loss.backward()
        losses.append(output.loss.detach())
        sums.append(output.depth_sums)
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    return sum(losses), sum(sums), gradients


@pytest.mark.parametrize(
    ("kind", "options"),
    [*KINDS, *BY_GROUPS, ("parallel", {"attention": "dense"})],
)
def test_packed_rows_and_micro_batches_have_the_loss_of_the_batch(kind: str, options: dict[str, Any]) -> None:
    """Documents in separate rows, packed into rows, and in micro-batches of which one is empty.

    They start and end within answers, so a label, a feature or a key of a neighbouring document would show, and have
    different numbers of labels, so the mean of their means would differ.
    """
    target, drafter = target_and_drafter(kind, options)
    target, drafter = target.double(), drafter.double()
    generator, rows = torch.Generator().manual_seed(5), list[dict[str, Any]]()
    for length in (9, LENGTH, 4, 1, 7):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_mask": [int(t % 7 != 2) for t in range(length)]})
    loss, sums, gradients = run_step(drafter, target, [collate_right_padded(rows)])
    assert sums[2].min() > 0
    packed = [pack_documents(rows[:3]), pack_documents(rows[3:])]
    for batches in ([packed], [rows[:1], rows[1:], []], [rows[:3], packed[1:]]):
        found = run_step(drafter, target, list(map(collate_right_padded, batches)))
        torch.testing.assert_close(found[0], loss, atol=1e-6, rtol=1e-6)
        assert torch.equal(found[1][1:], sums[1:])
        torch.testing.assert_close(found[1][0], sums[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[2], gradients, atol=1e-6, rtol=1e-5)
