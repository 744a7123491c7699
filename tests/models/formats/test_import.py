"""Published layouts with random weights import as drafters that follow the papers, and export unchanged."""

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drafter_cases import drafted_logits
from support.eagle_reference import LayoutReference
from support.loader_rules import required_shapes
from support.published_layouts import ANGELSPEC, DFLASH, DRAFTED, LAYOUTS, TORCHSPEC
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from support.tiny_runs import recipe_file, recipe_in, save_target
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.formats import dflash
from draftsmith.models.formats.exporting import EXPORTERS, export_drafter
from draftsmith.models.formats.importing import IMPORT_FILE, import_drafter, read_checkpoint
from draftsmith.models.formats.layout import renamed
from draftsmith.models.formats.reading import Checkpoint
from draftsmith.models.target.features import target_features

TARGET = tiny_target(num_hidden_layers=4)
IDS = torch.tensor([[5, 9, 33, 17, 40, 8, 21, 55]])
NEWEST = 5  # the last committed token


def random_tensors(kind: str, to: str, config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = required_shapes(kind, to, config)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1.0
    if "d2t" in tensors:
        chosen = torch.arange(DRAFTED) * 3 + 1
        tensors["d2t"], tensors["t2d"] = chosen - torch.arange(DRAFTED), torch.zeros(VOCABULARY, dtype=torch.bool)
        tensors["t2d"][chosen] = True
        if kind == "dspark":  # its head has the target's rows
            tensors["lm_head.weight"] = TARGET.get_output_embeddings().weight.detach()[chosen].clone()
    return tensors


class Published:
    """A checkpoint in a published layout. `config` and `tensors` may be changed before it is imported.

    made: What the last import returned.
    """

    def __init__(self, folder: Path, layout: str, config: dict[str, Any] | None = None) -> None:
        self.folder = folder
        published, self.kind, file, self.to = LAYOUTS[layout]
        self.config = copy.deepcopy(published if config is None else config)
        self.tensors = random_tensors(self.kind, self.to, self.config)
        self._file = folder / "theirs" / file

    def load(self, to: str = "ours", target: PreTrainedModel = TARGET) -> Drafter:
        """Write the checkpoint, import it to a folder, and load the drafter."""
        self._file.parent.mkdir(exist_ok=True)
        (self._file.parent / "config.json").write_text(json.dumps(self.config))
        save = save_file if self._file.suffix == ".safetensors" else torch.save
        save(self.tensors, self._file)
        self.made = import_drafter(str(self._file.parent), target, self.folder / to)
        return load_drafter(self.folder / to, target)

    def check_export(self, drafter: Drafter) -> dict[str, Any]:
        """Check that the exported drafter has these tensors again; return its config."""
        export_drafter(drafter, self.to, self.folder / "back", "TARGET", self.folder / "ours")
        back = read_checkpoint(self.folder / "back")
        assert_same(back.tensors, self.tensors)
        return back.config


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in expected.items())


@pytest.fixture
def published(tmp_path: Path) -> "Publish":
    return partial(Published, tmp_path)


Publish = Callable[..., Published]


def reference(tensors: dict[str, Tensor]) -> LayoutReference:
    return LayoutReference(tensors, TARGET.get_input_embeddings().weight, TARGET.get_output_embeddings().weight)


def features_of(drafter: Drafter) -> Tensor:
    return target_features(TARGET, IDS, layers=drafter.feature_layers)[0]


def check_drafts(drafter: Drafter, expected: Tensor) -> None:
    """Check the logits of a chain along the true tokens after NEWEST; `expected` are [depths, V']."""
    features, decoder = features_of(drafter), drafter.decoder(IDS.shape[1])
    decoder.start(IDS[0, :3], features[:3])
    decoder.observe(IDS[0, 3 : NEWEST + 1], features[2:NEWEST])
    drafted = drafted_logits(drafter, decoder, IDS[0], NEWEST)[: len(expected)]
    torch.testing.assert_close(drafted, drafter.columns.widened(expected, float("-inf")), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_import_and_export_keep_every_tensor(layout: str, published: Publish) -> None:
    theirs = published(layout)
    drafter = theirs.load()
    if (theirs.kind, theirs.to) in EXPORTERS:
        theirs.check_export(drafter)


@pytest.mark.parametrize(("layout", "layers", "from_anchor"), [("dflash", [1, 3], False), ("dspark", [2, 3], True)])
def test_feature_layers_of_blocks_count_outputs(
    layout: str, layers: list[int], from_anchor: bool, published: Publish
) -> None:
    """Published ids are one less than ours; the kind's default reading applies if the config has no setting."""
    config = published(layout).load().config
    assert (config.feature_layers, config.sample_from_anchor, config.mask_token_id) == (layers, from_anchor, 7)


def test_windows_of_blocks_are_imported(tmp_path: Path) -> None:
    """Layers with a window are causal unless the config says otherwise (vLLM 0.32, `_dflash_layer_causal`)."""
    slides, full = "sliding_attention", "full_attention"
    cases = [
        ({"layer_types": [slides, slides], "sliding_window": 9}, {}, (9, True)),
        ({"layer_types": [slides, slides], "sliding_window": 9, "is_causal": False}, {}, (9, False)),
        ({"layer_types": [full, full], "sliding_window": 9}, {"use_swa": True, "swa_window_size": 7}, (7, True)),
        ({"layer_types": [full, full], "sliding_window": 9}, {}, (None, False)),
        ({"layer_types": [slides, full], "sliding_window": 9}, {}, "one `sliding_window` in all layers"),
        ({"layer_types": [slides, slides]}, {}, "`sliding_window` is missing"),
    ]
    for at_top, in_blocks, expected in cases:
        config = {**DFLASH, **at_top, "dflash_config": {**DFLASH["dflash_config"], **in_blocks}}
        read = partial(dflash.parameters, Checkpoint(config, {}), TARGET.config.to_dict())
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                read()
        else:
            options = read().options
            assert (options["sliding_window"], options["causal"]) == expected


@pytest.mark.parametrize(
    ("layout", "layers", "normed"),
    [
        ("specforge", (1, 2, 3), False),
        ("vllm", (0, 2, 3), False),
        ("eagle3.1", (0, 2, 3), False),
        ("speculators", (1, 2, 3), True),
        ("speculators-normed", (1, 2, 3), True),
    ],
)
def test_eagle3(layout: str, layers: tuple[int, ...], normed: bool, published: Publish) -> None:
    """SpecForge numbers feature layers one lower; speculators adds the attention to the normed feature.

    With `norm_output` the next depth reads the state after the final norm.
    """
    checkpoint = published(layout)
    drafter = checkpoint.load()
    assert drafter.feature_layers == layers
    theirs, features = reference(checkpoint.tensors), features_of(drafter)
    tokens, g = IDS[0, 1 : NEWEST + 1].tolist(), theirs.eagle3_fused(features[:NEWEST])
    expected = []
    for depth in range(3):
        out = theirs.eagle3_slots(tokens, g, normed)[-1]
        expected.append(theirs.eagle3_logits(out))
        read = theirs.eagle3_feedback(out, bool(checkpoint.config.get("norm_output")))
        tokens, g = [*tokens, int(IDS[0, NEWEST + depth + 1]) if depth < 2 else 0], torch.cat([g, read[None]])
    check_drafts(drafter, torch.stack(expected))
    if "d2t" in checkpoint.tensors:
        assert drafter.columns.tokens([0, 1, 19]) == [1, 4, 58]


@pytest.mark.parametrize("layout", ["peagle", "peagle-normed"])
def test_peagle(layout: str, published: Publish) -> None:
    checkpoint = published(layout)
    drafter = checkpoint.load()
    theirs, features, mask = reference(checkpoint.tensors), features_of(drafter), checkpoint.tensors["mask_hidden"]
    tokens = [*IDS[0, 1 : NEWEST + 1].tolist(), 7, 7]
    g = theirs.eagle3_fused(torch.cat([features[:NEWEST], mask, mask]))
    out = theirs.eagle3_slots(tokens, g)
    check_drafts(drafter, theirs.eagle3_logits(out[-3:]))


@pytest.mark.parametrize(("theirs", "size"), [(TORCHSPEC, 16), (TORCHSPEC, 4), (ANGELSPEC, 7)])
def test_torchspec_and_angelspec(theirs: dict[str, Any], size: int, published: Publish) -> None:
    """Row j of a block predicts the token at its own place, the first one nothing; the size is in no config."""
    kind = "dspark" if "markov_rank" in theirs else "dflash"
    checkpoint = published(kind, {**theirs, "model_type": "qwen3"})
    checkpoint.config = {**theirs, "block_size": size} if size == 4 else theirs
    plain, checkpoint.tensors = checkpoint.tensors, renamed(checkpoint.tensors, dflash.TORCHSPEC_NAMES)
    new_names = checkpoint.tensors.keys() - plain.keys()
    assert new_names == {"context_proj.weight", "context_norm.weight", "final_norm.weight"}
    checkpoint.tensors["embed_tokens.weight"] = TARGET.get_input_embeddings().weight.detach().clone()
    drafter, made = checkpoint.load(), checkpoint.made
    assert [f"names no block_size: {size} was taken" in each for each in made.assumed] == [True] * (size != 4)
    assert (drafter.feature_layers, drafter.config.sample_from_anchor, made.kind) == ((1, 3), False, kind)
    assert (drafter.config.block_size, drafter.config.causal, drafter.config.rope) == (size, False, None)
    assert_same(drafter.state_dict(), plain)


def test_medusa(published: Publish) -> None:
    checkpoint = published("medusa")
    checkpoint.config["medusa_num_heads"] = 2  # as in Medusa's own uploads, which have tensors of more
    drafter = checkpoint.load()
    theirs, features = reference(checkpoint.tensors), features_of(drafter)
    expected = []
    for head in range(3):
        hidden = features[NEWEST - 1]
        for block in range(2):
            hidden = hidden + torch.nn.functional.silu(theirs.product(f"{head}.{block}.linear", hidden))
        expected.append(theirs.product(f"{head}.2", hidden))
    check_drafts(drafter, torch.stack(expected))


def test_hydra(published: Publish) -> None:
    """Head i reads the feature and i + 1 embeddings; its second block has the size of the first."""
    checkpoint = published("hydra")
    drafter = checkpoint.load()
    theirs, features = reference(checkpoint.tensors), features_of(drafter)
    read, expected = features[NEWEST - 1], []
    for head in range(3):
        read = torch.cat([read, theirs.embedding[IDS[0, NEWEST + head]]])
        first = f"hydra_mlp.{head}.0"
        hidden = theirs.product(f"{first}.res_connection", read)
        hidden = hidden + torch.nn.functional.silu(theirs.product(f"{first}.linear", read))
        hidden = hidden + torch.nn.functional.silu(theirs.product(f"hydra_mlp.{head}.1.linear", hidden))
        expected.append(theirs.product(f"hydra_lm_head.{head}", hidden))
    check_drafts(drafter, torch.stack(expected))


def test_separate_head_for_all_tokens_is_kept(published: Publish) -> None:
    """EAGLE-3 for Vicuna has one: 32,000 of 32,000 tokens. It is not a copy of the target's."""
    theirs = published("vllm")
    head = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(8))
    theirs.tensors["lm_head.weight"] = head
    drafter = theirs.load()
    assert torch.equal(drafter.lm_head.weight, head)
    assert theirs.check_export(drafter)["draft_vocab_size"] == VOCABULARY


def test_only_the_targets_embedding_is_accepted(published: Publish, tmp_path: Path) -> None:
    theirs = published("eagle")
    theirs.tensors["embed_tokens.weight"] = TARGET.get_input_embeddings().weight.clone()
    theirs.load()
    theirs.tensors["embed_tokens.weight"][3, 3] += 1.0
    with pytest.raises(UserError, match="embed_tokens is not the target's, and eagle drafters here have no separate"):
        theirs.load("other")
    assert not (tmp_path / "other").exists()


def test_block_head_must_have_the_targets_rows(published: Publish) -> None:
    theirs = published("dspark-reduced")
    assert theirs.load().columns.tokens([0, 1, 19]) == [1, 4, 58]
    theirs.tensors["lm_head.weight"][3, 3] += 1.0
    with pytest.raises(UserError, match="lm_head is not the target's, and dspark drafters here have no separate one"):
        theirs.load("other")


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 7.0}}

# Factors for heads of 6 dimensions; those here have 8.
FACTORS = {"factor": 4.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}


def change_map(make: Callable[[Tensor], Tensor], marked: bool = False) -> Change:
    """Return a change of `d2t`, without `t2d` unless it is `marked`."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = make(tensors["d2t"].clone())
        if not marked:
            del tensors["t2d"]

    return change


def drop(*names: str) -> Change:
    """Return a change that leaves out the tensors whose names begin so."""
    return lambda config, tensors: [tensors.pop(name) for name in [*tensors] if name.startswith(names)]


@pytest.mark.parametrize(
    ("layout", "change", "sentence"),
    [
        ("vllm", lambda c, t: c.update(rms_norm_eps=1e-5), "rms_norm_eps is 1e-05 where the target's layers have"),
        ("vllm", lambda c, t: c.update(vocab_size=99), "vocab_size is 99 where the target has 61"),
        ("vllm", lambda c, t: c.update(fc_norm=True), "fc_norm.0.weight, fc_norm.1.weight, .* missing"),
        ("vllm", lambda c, t: c.update(fc_norm=True, norm_before_fc=True), "exclude each other"),
        ("vllm", lambda c, t: c.pop("eagle_aux_hidden_state_layer_ids"), "names no eagle_aux_hidden_state_layer_ids"),
        ("vllm", lambda c, t: c.update(num_aux_hidden_states=2), "num_aux_hidden_states is 2, and .* names 3 layers"),
        ("vllm", lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=["0"]), "not a list of whole numbers"),
        ("vllm", lambda c, t: c.update(eagle_config=[1]), r"`eagle_config` is \[1\], not a mapping of keys"),
        ("vllm", lambda c, t: c.update(norm_output="no"), "`norm_output` is 'no', neither true nor false"),
        ("specforge", lambda c, t: (c["eagle_config"].update(use_aux_hidden_state=False), t.pop("fc.weight")),
         "use_aux_hidden_state is false, .* trained on fused layers"),
        ("eagle", lambda c, t: c.update(rope_theta="10000"), "`rope_theta` is '10000', not a finite number above 0"),
        ("vllm", lambda c, t: c.update(rope_theta=float("inf")), "`rope_theta` is inf, not a finite number above 0"),
        ("vllm", lambda c, t: c.update(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5 where .* have 1.0"),
        ("vllm", lambda c, t: c.update(rope_scaling={"rope_type": "linear", "factor": float("nan")}), "infinite or"),
        ("vllm", lambda c, t: c.update(rope_scaling={"rope_type": "odd"}), "rope_type odd"),
        ("vllm", lambda c, t: c.update(rope_scaling={"rope_type": "llama3"}), "not what transformers reads"),
        ("vllm", lambda c, t: c.update(rope_parameters={"sliding_attention": ROPES}), "none for .*full_attention"),
        ("vllm", lambda c, t: c.update(rope_scaling={"rope_type": "longrope", **FACTORS}), "no RoPE of .* have 8 dim"),
        ("vllm", lambda c, t: c.update(layer_types="sliding_attention"), "not a list of each layer's type"),
        ("vllm", lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight .torch.int8. is quan"),
        ("vllm", lambda c, t: t["fc.weight"].fill_(float("nan")), "fc.weight .* or has infinite or NaN values"),
        ("vllm", lambda c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}), "q_norm.weight not in a"),
        ("vllm", lambda c, t: t.update({"lm_head.weight": torch.tensor(1.0)}), "lm_head is not the target's"),
        ("specforge", drop("d2t", "t2d"), "names a draft vocabulary of 20 tokens of 61, but the checkpoint has no d2t"),
        ("specforge", change_map(lambda d2t: d2t + 10), "d2t names token 62, and the target has 61"),
        ("specforge", change_map(lambda d2t: d2t - 2), "d2t names token -1, and the target has 61"),
        ("specforge", change_map(lambda d2t: torch.cat([d2t[:1], d2t[:1] - 1, d2t[2:]])), "d2t names a token twice"),
        ("specforge", change_map(lambda d2t: d2t[:9]), "`draft_vocab_size` is 20, but d2t names 9 tokens"),
        ("specforge", change_map(lambda d2t: d2t.float()), "d2t is torch.float32 .*, not a list of whole numbers"),
        ("specforge", change_map(lambda d2t: d2t + 1, marked=True), "t2d marks other tokens than d2t names"),
        ("specforge", lambda c, t: t.update(t2d=t["t2d"][:9]), r"t2d is \[9\] where the target has 61 tokens"),
        ("eagle", lambda c, t: t.update(d2t=torch.tensor(1.0)), r"d2t is torch.float32 \[\], not a list of whole"),
        ("medusa", lambda c, t: t.update(d2t=torch.tensor(1.0)), "d2t not in a medusa drafter"),
        ("eagle", lambda c, t: t.update({"embed_tokens.weight": TARGET.get_input_embeddings().weight.to(torch.int8)}),
         "embed_tokens is not the target's"),
        ("dflash", lambda c, t: c.update(is_causal="false"), "`is_causal` is 'false', neither true nor false"),
        ("dspark", lambda c, t: c.update(markov_rank=10**9), "markov_head.markov_w1.weight, .* of another shape"),
        ("dspark", lambda c, t: c.update(markov_rank=10**18), "`markov_rank` is 10*, not a whole number from 1 to"),
        ("speculators", lambda c, t: c.pop("transformer_layer_config"), "`transformer_layer_config` is missing"),
        ("eagle", drop("fc.weight"), "none of the supported layouts"),
        ("medusa", drop("1."), r"blocks.1.layers.0.bias, .* missing"),
        ("medusa", lambda c, t: t.update({"9" * 5000 + ".0.linear.weight": torch.zeros(1)}), r"a block .* is \[1\]"),
        ("medusa", lambda c, t: t.update({"9999.0.linear.weight": torch.zeros(32, 32)}), "num_heads"),
        ("hydra", lambda c, t: c.update(hydra_head_arch="prefix-mlp"), "hydra_head_arch: prefix-mlp"),
        ("hydra", lambda c, t: c.pop("grounded_heads"), "grounded_heads: False"),
    ],
)  # fmt: skip
def test_incompatible_checkpoint_is_reported(
    layout: str, change: Change, sentence: str, published: Publish, tmp_path: Path
) -> None:
    theirs = published(layout)
    change(theirs.config, theirs.tensors)
    with pytest.raises(UserError, match=sentence):
        theirs.load()
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("layout", ["specforge", "dspark-reduced"])
def test_draft_vocabulary_in_other_forms(layout: str, published: Publish) -> None:
    """Ids in another order, together with the heads' rows; ids in place of offsets, which t2d shows; t2d alone."""
    theirs = published(layout)
    expected, plain = theirs.load().state_dict(), dict(theirs.tensors)
    ids, order = plain["d2t"] + torch.arange(DRAFTED), torch.arange(DRAFTED - 1, -1, -1)
    rows = {name: plain[name][order] for name in ("lm_head.weight", "markov_head.markov_w2.weight") if name in plain}
    for number, changed in enumerate(
        ({**rows, "d2t": ids[order] - torch.arange(DRAFTED)}, {"d2t": ids}, {"d2t": None})
    ):
        theirs.tensors = {name: value for name, value in {**plain, **changed}.items() if value is not None}
        assert_same(theirs.load(f"again-{number}").state_dict(), expected)


def test_rope_of_the_layers_type_is_read(published: Publish) -> None:
    theirs = published("vllm")
    del theirs.config["rope_theta"]
    theirs.config["rope_parameters"] = ROPES
    assert theirs.load().config.rope["rope_theta"] == 5e5
    theirs.config |= {"layer_types": ["sliding_attention"], "sliding_window": 9}
    assert theirs.load("sliding").config.rope["rope_theta"] == 7.0


def test_number_of_draft_tokens_is_kept(published: Publish) -> None:
    for layout, options in (("speculators", {"draft_depth": 3}), ("peagle", {"num_masks": 2})):
        theirs = published(layout)
        theirs.config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": 3}]}
        config = theirs.load(layout).config
        assert {key: getattr(config, key) for key in options} == options


def test_weights_that_are_not_there(published: Publish, tmp_path: Path) -> None:
    """A git-lfs pointer, a shard that an index names, another object than tensors; a pipe is no weights file."""
    theirs = published("vllm")
    theirs.load()
    file, again = tmp_path / "theirs" / "model.safetensors", tmp_path / "again"

    def check(sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            import_drafter(str(file.parent), TARGET, again)

    index = tmp_path / "theirs" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "model-2.safetensors"}}))
    check(r"model-2\.safetensors is missing, a part of the weights that model\.safetensors\.index\.json names")
    index.unlink()
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    check("is a git-lfs pointer, not the weights: run `git lfs pull`")
    file.unlink()
    os.mkfifo(file)
    check("is no checkpoint: name a folder")
    file.unlink()
    torch.save({"state_dict": theirs.tensors}, file.with_name("pytorch_model.bin"))
    check("holds more than tensors by name")


def test_guessed_layers_are_reported(published: Publish, tmp_path: Path) -> None:
    """The guess is that of all engines and the authors' code, 2, L/2 and L-3; named layers are not reported."""
    deep, theirs = tiny_target(num_hidden_layers=12), published("vllm")
    theirs.load("named", deep)
    assert theirs.made.assumed == []
    del theirs.config["eagle_aux_hidden_state_layer_ids"]
    assert theirs.load("guessed", deep).feature_layers == (2, 6, 9)
    (sentence,) = json.loads((tmp_path / "guessed" / IMPORT_FILE).read_text())["assumed"]
    assert theirs.made.assumed == [sentence]
    assert "names no eagle_aux_hidden_state_layer_ids: [2, 6, 9] were guessed" in sentence


@pytest.mark.parametrize("layout", ["vllm", "specforge", "eagle", "peagle", "dflash", "dspark", "speculators"])
@pytest.mark.parametrize("theta", [500_000.0, None])
def test_rope_of_the_drafter_is_kept(layout: str, theta: float | None, published: Publish) -> None:
    """It is that of the checkpoint's config, or the readers' default if it names none; the export has it again."""
    target = tiny_target(num_hidden_layers=4, rope_parameters={"rope_type": "default", "rope_theta": 30_000.0})
    theirs = published(layout)
    layers = theirs.config.get("transformer_layer_config", theirs.config)
    layers["rope_theta"] = theta
    if theta is None:
        del layers["rope_theta"]
    drafter = theirs.load("ours", target)
    wanted = {"rope_type": "default", "rope_theta": theta or 10_000.0}
    assert drafter.config.rope == wanted
    hidden, positions = torch.zeros(1, 5, 32), torch.arange(5)[None]
    angles = 4 * (theta or 10_000.0) ** (-torch.arange(0, 8, 2) / 8)
    cos, _ = drafter.rotary_of(hidden, positions)
    torch.testing.assert_close(cos[0, 4, :4], angles.cos())
    sentence = (
        "names no rope_theta: 10,000 was taken"
        if theta is None
        else r"another RoPE \(default, 500,000\) than .* \(default, 30,000"
    )
    assert re.search(sentence, theirs.made.assumed[0])
    assert theirs.check_export(drafter)["rope_theta"] == wanted["rope_theta"]


@pytest.mark.parametrize("layout", ["vllm", "specforge", "peagle", "eagle", "dflash", "medusa"])
def test_names_with_a_model_prefix(layout: str, published: Publish) -> None:
    """Some trainers save names with the prefix `model.`."""
    theirs = published(layout)
    plain = theirs.load()
    prefix = "model.medusa_heads." if layout == "medusa" else "model."
    unprefixed = ("lm_head", "d2t", "t2d")
    theirs.tensors = {n if n.startswith(unprefixed) else prefix + n: value for n, value in theirs.tensors.items()}
    assert_same(theirs.load("again").state_dict(), plain.state_dict())
    assert theirs.made.kind == theirs.kind


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("draft_model", {}),
        ("parallel", {"feature_layers": [1, -1], "draft_vocab_size": 20, "first_token": False}),
        ("parallel", {"inputs": "embedding", "shared_mask": True}),
    ],
)
def test_export_imports_again(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    drafter, out = tiny_drafter_of(kind, TARGET, **options), tmp_path / "out"
    export_drafter(drafter, "vllm", out, "TARGET", tmp_path)
    assert import_drafter(str(out), TARGET, tmp_path / "back").kind == kind
    again = load_drafter(tmp_path / "back", TARGET)
    assert_same(again.state_dict(), drafter.state_dict())
    assert again.reads_first_token == drafter.reads_first_token


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, r"rope_parameters is .*: import a drafter"),
        ({"pard_token": 5}, "a PARD drafter is not imported any more: train drafter.kind=parallel"),
    ],
)  # fmt: skip
def test_unfit_draft_model_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    export_drafter(tiny_drafter_of("draft_model", TARGET), "vllm", tmp_path / "out", "TARGET", tmp_path)
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(UserError, match=sentence):
        import_drafter(str(tmp_path / "out"), TARGET, tmp_path / "back")


def test_import_command(published: Publish, tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    medusa = published("medusa")
    medusa.load("first")
    recipe = recipe_in(tmp_path, drafter={"kind": "medusa", "options": {"num_heads": 3, "num_layers": 2}})
    file = recipe_file(recipe)
    result = CliRunner().invoke(app, ["import", file, "--from", str(tmp_path / "theirs")])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "run" / "drafter"
    assert json.loads((folder / IMPORT_FILE).read_text())["kind"] == "medusa"
    assert torch.equal(load_file(folder / "model.safetensors")["lm_heads.1.weight"], medusa.tensors["1.2.weight"])
    elsewhere = ["--from", str(tmp_path / "theirs"), "--to", str(tmp_path / "here"), "--json"]
    told = CliRunner().invoke(app, ["import", file, *elsewhere])
    assert json.loads(told.stdout) == {"kind": "medusa", "folder": str(tmp_path / "here"), "assumed": []}
    assert "to measure it, add a method with `drafter: " in told.stderr
    again = CliRunner().invoke(app, ["import", file, "--from", str(tmp_path / "theirs")])
    assert (again.exit_code, "already exists" in again.stderr) == (2, True)
    other = [*elsewhere[:2], "drafter.kind=eagle3", "name=other"]
    refused = CliRunner().invoke(app, ["import", file, *other])
    assert "is a drafter of kind medusa, and the recipe says drafter.kind=eagle3: correct" in refused.stderr
    nothing = CliRunner().invoke(app, ["import", file])
    assert (nothing.exit_code, "--from" in nothing.stderr, "import:" in nothing.output) == (2, True, False)


def test_code_in_a_pickle_is_not_run(published: Publish, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harmed",))

    theirs = published("medusa")
    theirs.tensors = {"0.0.linear.weight": Harm()}
    with pytest.raises(UserError, match="cannot be read"):
        theirs.load()
    assert not (tmp_path / "harmed").exists()
