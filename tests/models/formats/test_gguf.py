"""Drafters as GGUF files, checked by llama.cpp's loader rules; test_llamacpp_serves.py runs a real llama-server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.gguf_target import embedded_gguf
from support.served_drafters import IN_LLAMACPP

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens import bounded
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.formats import llamacpp
from draftsmith.models.formats.exporting import EXPORTERS, GgufTarget, export_drafter, refusal
from draftsmith.models.formats.llamacpp import FILE, tokenizer_of
from draftsmith.models.target.loading import load_target, load_tokenizer
from draftsmith.recipes.schema import TargetRecipe

MAPS = ("d2t", "t2d")  # of a draft vocabulary


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(TargetRecipe(model="embedded", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def file(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the target's file; exports copy no tokenizer, which takes a second."""
    written = embedded_gguf(tmp_path_factory.mktemp("gguf"), *target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llamacpp, "tokenizer_of", lambda *_: [])
        yield written


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end within 0.2 s"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses a conversation .*is unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('touch FLAG') }}", "refuses a conversation .*unsafe"),
        ("{% include '/etc/passwd' %}", "refuses a conversation"),
        ("{% for a in", "refuses a conversation"),
    ],
)
def test_hostile_template_in_a_gguf_file(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, sentence: str
) -> None:
    """It is reported in one sentence, and none of its code runs."""
    monkeypatch.setattr(bounded, "WITHIN_S", 0.2)
    monkeypatch.chdir(tmp_path)
    file = embedded_gguf(tmp_path, *target, template.replace("FLAG", str(tmp_path / "flag")))
    tokenizer = load_tokenizer(TargetRecipe(model=str(tmp_path), gguf_file=file.name))
    with pytest.raises(UserError, match=sentence):
        prompt_token_ids(tokenizer, [Turn("user", "Hello")])
    assert not (tmp_path / "flag").exists()


def build_drafter(kind: str, options: dict[str, Any], target: Any) -> Drafter:
    torch.manual_seed(0)
    drafter = load_drafter_class(kind).from_target(target[0], options)
    for parameter in drafter.parameters():  # norms and confidence heads too
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    return drafter.attach(target[0]).freeze()


def export_to(drafter: Drafter, file: Path, folder: Path, dtype: str = "f32") -> Path:
    """Export the drafter, whose checkpoint is checked before, and return its file."""
    drafter.save_pretrained(folder / "drafter")
    export_drafter(drafter, "gguf", folder / "x", str(file), folder / "drafter", (), GgufTarget(file, dtype))
    return folder / "x" / FILE


@pytest.mark.parametrize("name", IN_LLAMACPP)
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_file_has_every_tensor(name: str, dtype: str, target: Any, file: Path, tmp_path: Path) -> None:
    """By size and norm: rows of queries and keys lie in another order, and a map holds ids in place of offsets."""
    kind, options = IN_LLAMACPP[name]
    drafter = build_drafter(kind, options, target)
    written = EXPORTERS[drafter.config.kind, "gguf"].write(drafter).tensors
    file = export_to(drafter, file, tmp_path, dtype)
    read = {
        each.name: torch.from_numpy(gguf.quants.dequantize(each.data, each.tensor_type).copy())
        for each in gguf.GGUFReader(file).tensors
        if each.name not in MAPS
    }
    kept = {name: each for name, each in written.items() if name not in MAPS}
    expected, found = (
        sorted((each.numel(), float(each.float().norm())) for each in tensors.values()) for tensors in (kept, read)
    )
    assert found == [pytest.approx(each, rel=1e-6 if dtype == "f32" else 1e-2) for each in expected]


def test_eagle3_layer_and_token_ids_follow_its_loader(target: Any, file: Path, tmp_path: Path) -> None:
    options = {"draft_vocab_size": 1000, "feature_layers": [1, 4, 7], "norm_before_residual": True}
    drafter = build_drafter("eagle3", options, target)
    chosen = torch.arange(4096)[torch.arange(4096) % 4 == 1][:1000]
    drafter.choose_draft_vocab(torch.bincount(chosen, minlength=4096))
    read = gguf.GGUFReader(export_to(drafter, file, tmp_path))
    assert read.fields["eagle3.target_layers"].contents() == [1, 4, 7]
    assert read.fields["eagle3.norm_before_residual"].contents() is True
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    assert tensors["d2t"].tolist() == chosen.tolist()
    assert tensors["output.weight"].shape == (1000, 192)
    queries = drafter.layers[0].self_attn.q_proj.weight  # a head's first and second half interleaved
    for row, of_ours in ((0, 0), (1, 32), (2, 1), (63, 63), (64, 64), (65, 96)):
        assert tensors["blk.0.attn_q.weight"][row].tolist() == queries[of_ours].tolist()
    assert "token_embd.weight" not in tensors  # the target's


def test_drafters_that_loaders_cannot_read_are_refused(target: Any, file: Path, tmp_path: Path) -> None:
    two = build_drafter("eagle3", {"feature_layers": [2, 7]}, target).config
    assert "fuses three layers of the target, not [2, 7]: train with three layers in" in str(refusal(two, "gguf"))
    normed = build_drafter("eagle3", {"fc_norm": True}, target).config
    assert "train with drafter.options.fc_norm=false" in str(refusal(normed, "gguf"))
    assert "has no place for parallel: train with drafter.kind=eagle3" in str(
        refusal(build_drafter("parallel", {}, target).config, "gguf")
    )
    with pytest.raises(UserError, match="cannot be read as the GGUF file of a target"):
        tokenizer_of(tmp_path, target[0].config.to_dict())
    with pytest.raises(UserError, match="is another target's: its hidden_size is 192, not 576"):
        tokenizer_of(file, {**target[0].config.to_dict(), "hidden_size": 576})
