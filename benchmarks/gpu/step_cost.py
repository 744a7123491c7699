"""The cost of a step, a draft and a round of SmolLM2-135M in bf16, without and with CUDA graphs.

Its weights are random unless `make smollm2-target` has fetched the real ones. Steps are measured as by `step_price.py`,
next to a read of all weights. `size N` only compiles the forward of a tree of N nodes, for torch's cache on disk.
"""

import time
from typing import Any

import torch
from parts.shapes import random_target
from parts.timing import Work, wait
from step_price import bushy, step_prices
from torch.autograd import DeviceType

from draftsmith.eval.bench.bandwidth import WeightReading
from draftsmith.eval.decoding.generate import Generation, decode_round, generate
from draftsmith.eval.decoding.method import Autoregressive, Method
from draftsmith.eval.decoding.session import TargetSession, open_session
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.eval.trees.verify import DraftTree
from draftsmith.files import cache_root
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.decoding.decoders import Compilable, SequenceDecoder
from draftsmith.models.kernels.attention import use_own_attention
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.loading import load_target
from draftsmith.models.target.packaged import SMOLLM2
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import MethodConfig, TargetRecipe
from gpu.step import Step, run_step

ROWS = (1, 8, 16, 64)
TREE = MethodConfig(name="tree", tree="best_first", nodes=7, branch=4)  # with the root 8 nodes
PROMPT = [5] * 64
TOP_KERNELS = 12
GREEDY = Sampling()


def main(step: Step) -> None:
    if step.part_name:
        compile_size(step, int(step.part_name))
        return
    with step.part("uncompiled"):
        target = smollm2(step)
        step.add("weights_bytes", WeightReading(target).bytes)
        with open_session(target, session_tokens(step), False) as session:
            step.add("uncompiled", prices(step, session, target, step.size(ROWS, (1, 8))))
            step.add("uncompiled loop", loop(step, session, Autoregressive()))
    target = smollm2(step)
    compiled_prices(step, target, "compiled", ROWS[:2])
    with open_session(target, session_tokens(step), step.on_gpu) as session:
        with step.part("compiled loop"):
            step.add("compiled loop", loop(step, session, Autoregressive()))
        drafts_and_rounds(step, session, target)
        with step.part("kernels"):
            session.prefill(PROMPT)
            work = lambda: session.forward_tree(tree_of(8))  # noqa: E731
            step.add("kernels", kernels(step, work, step.size(10, 2)))
    compiled_prices(step, target, "compiled, more rows", ROWS[2:])


def compiled_prices(step: Step, target: Any, key: str, rows: tuple[int, ...]) -> None:
    """Measure compiled forwards without padding: in 16 bits a session for answers pads all to one size."""
    if step.has_time(key, step.size(25, 2)):
        with step.part(key), open_session(target, session_tokens(step), step.on_gpu, same_size=False) as session:
            step.add(key, prices(step, session, target, rows))


def smollm2(step: Step) -> Any:
    """Return the target: SmolLM2-135M-Instruct if its file is in draftsmith's cache, otherwise random weights."""
    folder = cache_root() / "smollm2"
    if step.on_gpu and (folder / SMOLLM2.gguf).is_file():
        with step.part("real weights"):
            recipe = TargetRecipe(model=str(folder), gguf_file=SMOLLM2.gguf, dtype="bfloat16", device=str(step.device))
            target = load_target(recipe)[0]
            step.add("weights", "SmolLM2-135M-Instruct")
            return target
    torch.manual_seed(0)
    target = random_target(step.size("135m", "embedded"), step.device, "bfloat16")
    use_own_attention(target)
    step.add("weights", "random")
    return target


def session_tokens(step: Step) -> int:
    return step.size(1280, 256)


def tree_of(nodes: int) -> DraftTree:
    return DraftTree([7] * nodes, bushy(nodes))


def compile_size(step: Step, nodes: int) -> None:
    """Compile the forward for trees of a size, and run it until its graph is replayed."""
    with open_session(smollm2(step), session_tokens(step), step.on_gpu) as session:
        session.prefill(PROMPT)
        started = time.perf_counter()
        for _ in range(4):
            session.forward_tree(tree_of(nodes))
        wait(step.device)
        step.add("seconds", time.perf_counter() - started)


def prices(step: Step, session: TargetSession, target: Any, rows: tuple[int, ...]) -> dict[str, Any]:
    context, turns = step.size(512, 32), step.size(30, 3)
    result = step_prices({"step": session}, WeightReading(target), list(rows), context, turns)
    return {"read_s": result["read_s"], **result["step"]}


def loop(step: Step, session: TargetSession, method: Method) -> dict[str, Any]:
    """Measure an answer: milliseconds of a round by its phases, and tokens/s without the prefill."""
    for new_tokens in (8, step.size(128, 12)):  # the first answer compiles
        answer = generate(session, method, PROMPT, GREEDY, new_tokens)
    decoding_s = answer.wall_time_s - answer.prefill_s
    phases = {name: getattr(answer, f"{name}_s") for name in ("draft", "verify", "choose", "commit")}
    return {
        "tokens_per_s": (len(answer.ids) - 1) / decoding_s,
        "tau": (len(answer.ids) - 1) / answer.rounds,
        "round_ms": 1e3 * decoding_s / answer.rounds,
        **{f"{name}_ms": 1e3 * spent_s / answer.rounds for name, spent_s in phases.items()},
        "forwards_share": (answer.draft_s + answer.verify_s) / decoding_s,
        "prefill_ms": 1e3 * answer.prefill_s,
        "device": kernels(step, rounds_of(session, method), step.size(10, 2)),
    }


def rounds_of(session: TargetSession, method: Method) -> Work:
    """Begin an endless answer, and return the work of one round of it."""
    generation = Generation(method, GREEDY, session.max_length_tokens)
    torch.inference_mode()(generation.begin)(session, PROMPT)
    return torch.inference_mode()(lambda: decode_round(session, generation))


def drafts_and_rounds(step: Step, session: TargetSession, target: Any) -> None:
    """Measure drafts of `parallel` and `eagle`, without and with compilation, and the rounds of a tree of 7."""
    for kind in ("parallel", "eagle"):
        for is_compiled in (False, True)[: step.size(2, 1)]:
            key = f"{kind}, compiled" if is_compiled else kind
            if not step.has_time(key, step.size(15, 2)):
                continue
            with step.part(key):
                recipe = load_recipe("smollm2-135m", [f"drafter.kind={kind}"]).drafter
                options = recipe.options | {"draft_vocab_size": step.size(16384, None)}
                drafter = load_drafter_class(kind).from_target(target, options).to(target.dtype)
                drafter.attach(target)
                decoder: SequenceDecoder = drafter.freeze().decoder(session.max_length_tokens)
                if is_compiled and isinstance(decoder, Compilable):
                    decoder.compile()
                session.read_layers(drafter.feature_layers)
                step.add(key, draft_figures(step, session, decoder, step.figures.get("compiled loop")))


def draft_figures(step: Step, session: TargetSession, decoder: SequenceDecoder, baseline: Any) -> dict[str, Any]:
    """Measure the milliseconds of a draft, and rounds with a tree of 7.

    Args:
        baseline: Figures of the loop without a drafter: a loop efficiency of 1 is a round that adds no more to its
            forwards than a round of the baseline does.
    """
    started = time.perf_counter()
    draft_seconds(session, decoder, 12)
    first_s = time.perf_counter() - started
    draft_s = draft_seconds(session, decoder, step.size(48, 8))
    rounds = loop(step, session, build_tree_drafter(TREE, decoder, GREEDY))
    if baseline:
        rounds["loop_efficiency"] = rounds["forwards_share"] / baseline["forwards_share"]
    return {"first_s": first_s, "draft_ms": 1e3 * draft_s, "rounds": rounds}


def draft_seconds(session: TargetSession, decoder: SequenceDecoder, new_tokens: int) -> float:
    """Measure the mean seconds of a draft over an answer's rounds after the first."""
    tree = MethodConfig(name="x", tree="best_first", nodes=12, branch=4)
    answer = generate(session, build_tree_drafter(tree, decoder, GREEDY), PROMPT, GREEDY, new_tokens)
    return answer.usual_draft_s / max(1, answer.rounds)


def kernels(step: Step, work: Work, calls: int) -> dict[str, Any]:
    """Profile calls of a work by torch's profiler.

    Returns:
        Milliseconds of a call: of its wall clock (without the profiler), of all kernels, of the device without a
        kernel, which waits for the host then; and the kernels that take longest, [name, milliseconds, calls].
    """
    wall_ms = 1e3 * step.median_s(work, calls)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if step.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(calls):
            work()
        wait(step.device)
    key = "self_device_time_total" if step.on_gpu else "self_cpu_time_total"
    averages = sorted(recorded.key_averages(), key=lambda each: -getattr(each, key))
    on_device = [each for each in averages if not step.on_gpu or each.device_type == DeviceType.CUDA]
    kernels_ms = sum(getattr(each, key) for each in on_device) / 1e3 / calls
    top = [[each.key[:80], getattr(each, key) / 1e3 / calls, each.count / calls] for each in on_device[:TOP_KERNELS]]
    return {"wall_ms": wall_ms, "kernels_ms": kernels_ms, "idle_ms": wall_ms - kernels_ms, "top": top}


if __name__ == "__main__":
    run_step(main)
