"""The target's forward over draft trees of 1 to 64 nodes, beside that of a single token, in turns; compiled or not."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from draftsmith.eval.decoding.compiled_session import CompiledSession
from draftsmith.eval.decoding.session import TargetSession, TargetStep
from draftsmith.eval.trees.device_tree import DeviceTree
from draftsmith.eval.trees.tree import DraftTree
from draftsmith.models.compiling import BACKEND
from parts.shapes import random_prompt, random_target, random_tree
from parts.suite import Suite
from parts.timing import compare, seconds

# Without CUDA only to see that it works: Dynamo without a compiler.
BACKENDS = {"cuda": BACKEND, "cpu": "eager"}


def run(suite: Suite) -> None:
    run_trees(suite, compiles=False)


def run_compiled(suite: Suite) -> None:
    run_trees(suite, compiles=True)


def run_trees(suite: Suite, compiles: bool) -> None:
    shape, device = suite.shape, suite.device
    target = random_target(shape, device)
    weights_bytes = sum(p.numel() * p.element_size() for p in target.parameters())
    weights_bytes -= target.get_input_embeddings().weight.nbytes  # of which a step reads a row
    with ExitStack() as stack:
        session = stack.enter_context(open_session(target, shape.session_tokens, compiles))
        stack.enter_context(torch.inference_mode())
        session.prefill(random_prompt(shape))
        if isinstance(session, CompiledSession):
            for nodes in shape.tree_nodes:
                with session.learning():
                    forward(session, tree_of(nodes, device))
        for nodes in shape.tree_nodes:
            suite.measure(f"{nodes}_nodes", figures, session, nodes, suite, weights_bytes)


def open_session(target: Any, length_tokens: int, compiles: bool) -> TargetSession:
    if compiles:
        return CompiledSession(target, length_tokens, backend=BACKENDS[target.device.type])
    return TargetSession(target, length_tokens)


def forward(session: TargetSession, tree: DraftTree | DeviceTree) -> TargetStep:
    """As the loop runs a tree: one that lies on the device as such."""
    return session.forward_device_tree(tree) if isinstance(tree, DeviceTree) else session.forward_tree(tree)


def tree_of(nodes: int, device: torch.device) -> DraftTree | DeviceTree:
    """On a GPU it lies there."""
    tree = random_tree(nodes)
    return DeviceTree.of(tree, device) if device.type == "cuda" else tree


def figures(session: TargetSession, nodes: int, suite: Suite, weights_bytes: int) -> dict[str, Any]:
    """base_s: of the single token; weight_bytes_per_s: of the target's weights, read once."""
    tree, single = (partial(forward, session, tree_of(number, suite.device)) for number in (nodes, 1))
    single()  # compiled, if at all, before the other
    first_s = seconds(tree, suite.device)
    compared = compare(tree, single, suite.device, suite.shape.repeats)
    return {
        **compared,
        "first_s": first_s,
        "context_tokens": session.length_tokens,
        "weight_bytes_per_s": weights_bytes / compared["median_s"],
    }
