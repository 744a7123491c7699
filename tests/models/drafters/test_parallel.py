"""The parallel drafter: training equals decoding, nothing leaks, and it travels without the target's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.tiny_models import LENGTH, MASKS, VOCABULARY, random_batch, tiny_parallel, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.models.base.registry import load_drafter, load_drafter_class
from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.groups.alignment import depth_labels
from draftsmith.models.groups.attention import BACKENDS
from draftsmith.models.groups.layers import SUPPORTED_MODEL_TYPES
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError

CPU_BACKENDS = tuple(backend for backend in BACKENDS if backend != "flex")


CASES = [
    ("llama", {}),
    ("llama", {"inputs": "embedding"}),
    ("llama", {"inputs": "hidden"}),
    ("llama", {"num_layers": 2}),
    ("llama", {"num_layers": 2, "inputs": "hidden", "init": "random"}),
    ("llama", {"mask_residual": True}),
    ("llama", {"num_masks": 0}),
    *((model_type, {}) for model_type in SUPPORTED_MODEL_TYPES if model_type != "llama"),
]


@pytest.mark.parametrize(("model_type", "options"), CASES)
@pytest.mark.parametrize("offset", [0, 23])
def test_training_equals_decoding(model_type: str, options: dict[str, Any], offset: int) -> None:
    """Logits of group t in one training forward = logits drafted after prefix t, fed in irregular chunks."""
    target = tiny_target(model_type)
    drafter = tiny_parallel(target, **options)
    ids = random_batch(target, 1)["input_ids"]
    positions = torch.arange(LENGTH).unsqueeze(0) + offset
    features = target_features(target, ids, None, positions)
    with torch.no_grad():
        training = drafter.group_logits(ids, features, positions)[0]
    decoder = drafter.decoder(LENGTH)
    for _second_use_of_the_same_decoder in range(2):
        decoder.start(ids[0, :3], features[0, :3], position_offset=offset)
        end = 3
        torch.testing.assert_close(decoder.draft(), training[:, end - 1], atol=1e-5, rtol=1e-5)
        for chunks in ((1,), (2, 1), (4,), (1, 1, 1)):
            for size in chunks:
                decoder.observe(ids[0, end : end + size], features[0, end - 1 : end + size - 1])
                end += size
            torch.testing.assert_close(decoder.draft(), training[:, end - 1], atol=1e-5, rtol=1e-5)


def test_prompt_and_first_token_in_one_draft() -> None:
    """The loop's way: start(prompt), observe(first token), one forward for both; prompts longer than the ready mask."""
    target = tiny_target()
    drafter = tiny_parallel(target)
    batch = random_batch(target, 1, 60)
    ids, features = batch["input_ids"][0], batch["features"][0]
    training = drafter.group_logits(batch["input_ids"], batch["features"])[0].detach()
    decoder = drafter.decoder(64)
    decoder.start(ids[:30], features[:30])
    decoder.observe(ids[30:31], features[29:30])
    torch.testing.assert_close(decoder.draft(), training[:, 30], atol=1e-5, rtol=1e-5)
    decoder.observe(ids[31:59], features[30:58])
    torch.testing.assert_close(decoder.draft(), training[:, 58], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="call start"):
        decoder.draft()


def test_the_decoder_says_when_it_is_full() -> None:
    target = tiny_target()
    batch = random_batch(target, 1)
    decoder = tiny_parallel(target).decoder(8)
    decoder.start(batch["input_ids"][0, :9], batch["features"][0, :9])
    with pytest.raises(ValueError, match="max_length_tokens=8"):
        decoder.draft()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_no_leak(backend: str) -> None:
    """Another token u (and its feature) changes no group before u; the feature at u none before u+1."""
    target = tiny_target()
    drafter = tiny_parallel(target, attention=backend, num_layers=2)
    batch = random_batch(target)
    ids, features, u = batch["input_ids"], batch["features"], 6
    changed_ids, changed_features = ids.clone(), features.clone()
    changed_ids[:, u] = (changed_ids[:, u] + 1) % VOCABULARY
    changed_features[:, u] += 1.0
    with torch.no_grad():
        before = drafter.stream_hidden(ids, features)
        token_changed = drafter.stream_hidden(changed_ids, features)
        feature_changed = drafter.stream_hidden(ids, changed_features)
    assert torch.equal(before[:, :, :u], token_changed[:, :, :u])
    assert torch.equal(before[:, :, : u + 1], feature_changed[:, :, : u + 1])
    assert (before[:, :, u:] != token_changed[:, :, u:]).any(-1).all()
    assert (before[:, :, u + 1 :] != feature_changed[:, :, u + 1 :]).any(-1).all()


def test_a_later_mask_changes_no_earlier_one() -> None:
    target = tiny_target()
    drafter = tiny_parallel(target)
    batch = random_batch(target)
    with torch.no_grad():
        before = drafter.stream_hidden(batch["input_ids"], batch["features"])
        drafter.masks[1] += 1.0
        after = drafter.stream_hidden(batch["input_ids"], batch["features"])
    assert torch.equal(before[:, :2], after[:, :2])
    assert (before[:, 2:] != after[:, 2:]).any(-1).all()


@pytest.mark.parametrize("inputs", ["both", "embedding"])
def test_backends_agree_on_the_loss_and_its_gradients(inputs: str) -> None:
    target = tiny_target().double()
    drafter = tiny_parallel(target, inputs=inputs)
    batch = random_batch(target)
    results = []
    for backend in CPU_BACKENDS:
        drafter.config.attention = backend
        drafter.zero_grad()
        output = drafter(**batch)
        output.loss.backward()
        results.append([output.loss.detach(), *(parameter.grad for parameter in drafter.parameters())])
    torch.testing.assert_close(results[0], results[1], atol=1e-9, rtol=1e-9)


def test_the_loss_is_the_weighted_mean_cross_entropy() -> None:
    """The chunked loss with its hand-made gradient = plain cross entropy over all logits."""
    target = tiny_target()
    drafter = tiny_parallel(target, depth_weights=[1.0, 2.0, 0.5, 0.25])
    batch = random_batch(target)
    output = drafter(**batch)
    output.loss.backward()
    gradients = [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]
    drafter.zero_grad()
    logits = drafter.group_logits(batch["input_ids"], batch["features"])
    labels = depth_labels(batch["input_ids"], batch["loss_mask"], MASKS + 1)
    expected = torch.zeros(())
    for j, weight in enumerate([1.0, 2.0, 0.5, 0.25]):
        loss = torch.nn.functional.cross_entropy(logits[:, j].flatten(0, 1), labels[:, j].flatten())
        expected = expected + weight / 3.75 * loss
        valid = labels[:, j] != -100
        assert output.depth_count[j] == valid.sum()
        assert output.depth_correct[j] == (logits[:, j].argmax(-1) == labels[:, j])[valid].sum()
        torch.testing.assert_close(output.depth_loss_sum[j] / valid.sum(), loss.detach())
    torch.testing.assert_close(output.loss, expected)
    expected.backward()
    torch.testing.assert_close(gradients, [p.grad for p in drafter.parameters() if p.grad is not None])


def test_labels_never_leave_the_turn() -> None:
    """Derived by hand: x = 10..16, assistant tokens at 2, 3 and 5."""
    ids = torch.arange(10, 17).unsqueeze(0)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 0]])
    expected = [[-100, 12, 13, -100, 15, -100, -100], [-100, 13, -100, -100, -100, -100, -100], [-100] * 7]
    assert depth_labels(ids, mask, 3)[0].tolist() == expected


def test_padding_on_the_right_changes_nothing() -> None:
    target = tiny_target()
    drafter = tiny_parallel(target)
    batch = random_batch(target)
    padded = {name: torch.nn.functional.pad(x, (0, 0, 0, 5) if x.ndim == 3 else (0, 5)) for name, x in batch.items()}
    torch.testing.assert_close(drafter(**padded).loss, drafter(**batch).loss)


def test_no_labels_no_nan() -> None:
    target = tiny_target()
    drafter = tiny_parallel(target)
    batch = random_batch(target)
    output = drafter(**{**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])})
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)


def test_the_target_gets_no_gradient_and_is_not_part_of_the_drafter() -> None:
    target = tiny_target()
    drafter = tiny_parallel(target)
    drafter(**random_batch(target)).loss.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert not any(VOCABULARY in parameter.shape for parameter in drafter.parameters())
    assert all(parameter.grad is not None for parameter in drafter.parameters())


@pytest.mark.parametrize("options", [{}, {"inputs": "embedding", "num_layers": 2}])
def test_save_load_attach_gives_the_same_logits(tmp_path: Path, options: dict[str, Any]) -> None:
    target = tiny_target("qwen3")
    drafter = tiny_parallel(target, **options)
    drafter.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())
    assert saved == {name for name, _ in drafter.named_parameters()}
    loaded = load_drafter(tmp_path, target)
    batch = random_batch(target)
    for model in (drafter, loaded.to("cpu")):
        assert isinstance(model, ParallelDrafter)
    with torch.no_grad():
        assert torch.equal(
            loaded.group_logits(batch["input_ids"], batch["features"]),
            drafter.group_logits(batch["input_ids"], batch["features"]),
        )


def test_a_bf16_drafter_with_a_bf16_target_decodes() -> None:
    target = tiny_target().bfloat16()
    drafter = tiny_parallel(target)
    batch = random_batch(target)
    drafter(**batch).loss.backward()  # fp32 drafter beside a bf16 target
    drafter = drafter.bfloat16()
    decoder = drafter.decoder(LENGTH)
    decoder.start(batch["input_ids"][0], batch["features"][0])
    assert decoder.draft().dtype == torch.float32


def test_every_feature_layer_is_normalised_by_itself() -> None:
    """A residual stream that is a hundred times larger than the others says neither more nor less."""
    target = tiny_target()
    drafter = tiny_parallel(target, feature_layers=[0, 1, -1])
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    features = target_features(target, ids, layers=drafter.feature_layers)
    assert features.shape[-1] == 3 * target.config.hidden_size
    louder = features.unflatten(-1, (3, -1)) * torch.tensor([100.0, 1.0, 3.0])[:, None]
    logits, same = (drafter.group_logits(ids, f) for f in (features, louder.flatten(-2)))
    torch.testing.assert_close(same, logits, atol=1e-4, rtol=0)
    swapped = features.unflatten(-1, (3, -1))[..., [1, 0, 2], :].flatten(-2)
    assert (drafter.group_logits(ids, swapped) - logits).abs().max() > 1e-2


def test_unsupported_architecture_names_those_that_work() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(UserError, match=r"`gpt2` is not supported.*llama, mistral"):
        ParallelDrafter.from_target(AutoModelForCausalLM.from_config(config), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_mask": 4}, "did you mean `num_masks`"),
        ({"inputs": "hiden"}, "drafter.options.inputs`: input should be 'embedding', 'hidden' or 'both', not 'hiden'"),
        ({"num_masks": "four"}, "num_masks`: input should be a valid integer, .*, not 'four'"),
        ({"feature_layers": [1, 0]}, r"ascending layer numbers from 0 to 1 \(and -1 at the end .*not \[1, 0\]"),
        ({"feature_layers": [-1, 0]}, "ascending layer numbers"),
        ({"feature_layers": []}, "ascending layer numbers"),
        ({"depth_weights": [1.0]}, r"5 of them \(one for each depth\)"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParallelDrafter.from_target(tiny_target(), options)


def test_wrong_kind_lists_the_kinds() -> None:
    with pytest.raises(UserError, match=r"drafter.kind `paralel` does not exist: use one of .*parallel"):
        load_drafter_class("paralel")


def test_another_target_is_refused() -> None:
    drafter = tiny_parallel(tiny_target())
    with pytest.raises(UserError, match="made for a target with vocab_size 61"):
        drafter.attach(tiny_target(vocab_size=70))


def test_no_drafter_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no trained drafter"):
        load_drafter(tmp_path, tiny_target())
