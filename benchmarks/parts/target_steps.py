"""The target's forward over draft trees of 1 to 64 nodes, beside that of a single token, in turns; compiled or not."""

from contextlib import ExitStack
from typing import Any

import torch

from draftsmith.eval.decoding.compiled_session import CompiledSession
from draftsmith.eval.decoding.session import TargetSession
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
                    session.forward_tree(random_tree(nodes))
        for nodes in shape.tree_nodes:
            suite.measure(f"{nodes}_nodes", figures, session, nodes, suite, weights_bytes)


def open_session(target: Any, length_tokens: int, compiles: bool) -> TargetSession:
    if compiles:
        return CompiledSession(target, length_tokens, backend=BACKENDS[target.device.type])
    return TargetSession(target, length_tokens)


def figures(session: TargetSession, nodes: int, suite: Suite, weights_bytes: int) -> dict[str, Any]:
    """base_s: of the single token; weight_bytes_per_s: of the target's weights, read once."""
    tree, single = random_tree(nodes), random_tree(1)
    session.forward_tree(single)  # compiled, if at all, before the other
    first_s = seconds(lambda: session.forward_tree(tree), suite.device)
    turns = suite.shape.repeats
    compared = compare(lambda: session.forward_tree(tree), lambda: session.forward_tree(single), suite.device, turns)
    return {
        **compared,
        "first_s": first_s,
        "context_tokens": session.length_tokens,
        "weight_bytes_per_s": weights_bytes / compared["median_s"],
    }
