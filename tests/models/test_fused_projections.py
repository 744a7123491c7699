"""Fused projections: fewer products in compiled forwards, and equal logits, memory, checkpoints and training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_drafter_of, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM

from draftsmith.eval.decoding.compiled_forward import Compiler
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.fused_projections import FusedProjection, fuse_projections

PROMPT = [5, 9, 33, 12, 40, 7]
TREE = DraftTree([7, 3, 20, 21, 22, 23], TreeShape.of((-1, 0, 0, 1, 2, 2)))


class Products:
    """A backend of `torch.compile` that runs a graph as it is and keeps the names of its products and its results."""

    def __init__(self) -> None:
        self.graphs: list[tuple[int, int]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        products = [node for node in graph.graph.nodes if node.target is torch._C._nn.linear]
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        self.graphs.append((len(products), len(output.args[0])))
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def storage_bytes(model: nn.Module) -> int:
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in model.parameters()}
    return sum(storages.values())


def projections(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedProjection)]


def test_layer_of_a_compiled_target_has_four_products() -> None:
    layers = 2
    target = tiny_target(num_hidden_layers=layers, attention_bias=True, mlp_bias=True)
    for name, part in target.named_parameters():
        if name.endswith("bias"):
            part.normal_()
    before, steps, products = storage_bytes(target), [], Products()
    for compiler in (None, Compiler(products, is_static=True)):
        with TargetSession(target, 40, compiler=compiler) as session:
            session.prefill(PROMPT)
            steps.append(session.forward_tree(TREE))
    torch.testing.assert_close(steps[1].logits, steps[0].logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(steps[1].features, steps[0].features, atol=1e-5, rtol=0)
    # 7 before; the LM head's is one more. Nothing else leaves the graph than logits and features.
    assert products.graphs == [(4 * layers + 1, 2)]
    assert storage_bytes(target) == before
    assert len(projections(target)) == 5 * layers
    attention = target.base_model.layers[0].self_attn
    memory = {part.weight.untyped_storage().data_ptr() for part in (attention.q_proj, attention.k_proj)}
    assert memory == {attention.q_proj.fused.weight.untyped_storage().data_ptr()}


# A layer's four, one of the features and the LM head; DFlash has one more, of its context's keys and values.
@pytest.mark.parametrize(("kind", "products"), [("parallel", 6), ("eagle3", 6), ("dflash", 7)])
def test_compiled_draft_has_fewer_products(kind: str, products: int) -> None:
    target = tiny_target(num_hidden_layers=4)
    options = {"num_layers": 1} if kind == "dflash" else {}
    drafter, counted = tiny_drafter_of(kind, target, **options), Products()
    decoder: Any = drafter.decoder(64)
    decoder.compile(backend=counted)
    decoder.start(torch.tensor(PROMPT), torch.randn(len(PROMPT), 32 * len(drafter.feature_layers)))
    (decoder.begin if hasattr(decoder, "begin") else decoder.draft)()
    assert [number for number, _ in counted.graphs] == [products]


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_weights_are_saved_and_loaded_under_their_names(model_type: str, tmp_path: Path) -> None:
    target = tiny_target(model_type)
    wanted = {name: part.clone() for name, part in target.state_dict().items()}
    fuse_projections(target)
    assert len(projections(target)) == 5 * target.config.num_hidden_layers
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for state in (target.state_dict(), loaded.state_dict()):
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], part) for name, part in wanted.items())


def test_trained_weights_are_those_of_the_next_compiled_forward() -> None:
    target = tiny_target()
    fuse_projections(target)
    before = [part.fused.weight.clone() for part in projections(target)]
    target.requires_grad_(True)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
    target(input_ids=torch.tensor([PROMPT]), use_cache=False).logits.square().sum().backward()
    assert all(part.weight.grad is not None for part in projections(target))
    optimizer.step()
    for part, old in zip(projections(target), before, strict=True):
        assert torch.equal(part.fused.weight.split(part.fused.sizes)[part.place], part.weight)
        assert not torch.equal(part.fused.weight, old)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda target: target.double()])
def test_copied_and_cast_models_have_weights_of_their_own(change: Any) -> None:
    target = tiny_target()
    fuse_projections(target)
    before = [part.fused for part in projections(target)]
    other = change(target)
    fuse_projections(other)
    assert all(part.fused is not fused for part, fused in zip(projections(other), before, strict=True))
    for part in projections(other):
        assert part.fused.weight.dtype == part.weight.dtype
        assert part.weight.untyped_storage().data_ptr() == part.fused.weight.untyped_storage().data_ptr()


def test_layers_with_different_inputs_have_their_own_products() -> None:
    attention: Any = tiny_target().base_model.layers[0].self_attn
    layers, inputs = [attention.q_proj, attention.k_proj, attention.v_proj], torch.randn(2, 3, 32)
    with torch.no_grad():
        wanted = [layer(inputs[min(place, 1)]) for place, layer in enumerate(layers)]
        fuse_projections(attention)
        compiled = torch.compile(
            lambda first, others: [layer(others if place else first) for place, layer in enumerate(layers)],
            backend="eager", fullgraph=True,
        )  # fmt: skip
        torch.testing.assert_close(compiled(*inputs), wanted)


def test_other_layers_stay_as_they_are() -> None:
    """Quantised layers, adapters and packed ones are of other classes, and their weights of other shapes."""

    class Adapter(nn.Linear):
        pass

    target = tiny_target()
    for layer in target.base_model.layers:
        layer.self_attn.k_proj.__class__ = Adapter
    fuse_projections(target)
    assert len(projections(target)) == 2 * len(target.base_model.layers)
    assert all(part.out_features == 48 for part in projections(target))
