"""Fused projections: fewer products in compiled forwards, and equal logits, memory, checkpoints and training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_drafter_of, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM

from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape
from draftsmith.models.decoding.forward import Compiler
from draftsmith.models.kernels.fused_projections import FusedAttention, FusedMLP, FusedModule, fuse_projections

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


def fused_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedModule)]


def check_views(module: Any) -> None:
    """Check that the layers' weights are views of the fused one."""
    for part, view in zip(
        [getattr(module, name) for name in module.fused], module._weight.split(module._sizes), strict=True
    ):
        assert (part.weight.data_ptr(), part.weight.dtype) == (view.data_ptr(), view.dtype)


def test_layer_of_a_compiled_target_has_four_products() -> None:
    layers = 2
    target = tiny_target(num_hidden_layers=layers, attention_bias=True, mlp_bias=True)
    for name, part in target.named_parameters():
        if name.endswith("bias"):
            part.normal_()
    before, steps, products = storage_bytes(target), [], Products()
    for compiler in (None, Compiler(products)):
        with TargetSession(target, 40, compiler=compiler) as session:
            session.prefill(PROMPT)
            steps.append(session.forward_tree(TREE))
    torch.testing.assert_close(steps[1].logits, steps[0].logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(steps[1].features, steps[0].features, atol=1e-5, rtol=0)
    # 7 before; the LM head's is one more. Nothing else leaves the graph than logits and features.
    assert products.graphs == [(4 * layers + 1, 2)]
    assert storage_bytes(target) == before
    assert len(fused_modules(target)) == 2 * layers
    for module in fused_modules(target):
        check_views(module)


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


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_fused_target_is_the_same_function_with_the_same_names(model_type: str, tmp_path: Path) -> None:
    target = tiny_target(model_type)
    ids, wanted = torch.tensor([PROMPT]), {name: part.clone() for name, part in target.state_dict().items()}
    logits = target(input_ids=ids).logits
    fuse_projections(target)
    assert len(fused_modules(target)) == 2 * target.config.num_hidden_layers
    torch.testing.assert_close(target(input_ids=ids).logits, logits, atol=1e-6, rtol=1e-5)
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for state in (target.state_dict(), loaded.state_dict()):
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], part) for name, part in wanted.items())


def test_trained_weights_are_those_of_the_next_forward() -> None:
    target, plain = tiny_target().double(), tiny_target().double()
    fuse_projections(target)
    grads = []
    for model in (target, plain):
        model.requires_grad_(True)
        model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits.square().sum().backward()
        grads.append([part.grad for part in model.parameters()])
    torch.testing.assert_close(*grads)
    torch.optim.AdamW(target.parameters(), lr=1e-2).step()
    for module in fused_modules(target):
        check_views(module)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda target: target.double()])
def test_copied_and_cast_models_have_weights_of_their_own(change: Any) -> None:
    target = tiny_target()
    fuse_projections(target)
    before = [module._weight for module in fused_modules(target)]
    for module, old in zip(fused_modules(change(target)), before, strict=True):
        check_views(module)
        assert module._weight.data_ptr() != old.data_ptr()


def test_other_layers_stay_as_they_are() -> None:
    """Quantised layers, adapters and packed ones are of other classes, and their weights of other shapes."""

    class Adapter(nn.Linear):
        pass

    target = tiny_target()
    for layer in target.base_model.layers:
        layer.self_attn.k_proj.__class__ = Adapter
    fuse_projections(target)
    assert not any(isinstance(module, FusedAttention) for module in target.modules())
    assert len([module for module in target.modules() if isinstance(module, FusedMLP)]) == len(target.base_model.layers)
