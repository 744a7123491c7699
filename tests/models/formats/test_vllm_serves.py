"""Exports in real vLLM: each kind loads, changes no greedy token, and is accepted by position as in our decoder.

The drafters are trained for a moment on the very answers that they are measured on: enough that every depth is accepted
now and then.
"""

import gc
import importlib.util
import json
import re
import shlex
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served_drafters import NEW_TOKENS, SERVED, Setup, briefly_trained, our_counts
from support.tiny_runs import recipe_file, recipe_in
from support.vllm_server import VllmServer, vllm_environment
from typer.testing import CliRunner

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.commands.cli import app
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import TRAINING_FILE, load_drafter_class
from draftsmith.models.formats.exporting import EXPORTERS, export_drafter, speculative_config
from draftsmith.models.target.loading import EMBEDDED_TARGET, load_target
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import TargetRecipe

__all__ = ["vllm_environment"]  # fixture
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
QUESTIONS, LONGEST_DRAFT = 12, 3


@pytest.fixture(scope="module")
def setup() -> Setup:
    target, tokenizer = load_target(TargetRecipe(model="embedded", dtype="float32", device="cpu"))
    asked = [question.turns[0] for question in load_questions("embedded")][:QUESTIONS]
    prompts = [prompt_token_ids(tokenizer, [Turn("user", text)]) for text in asked]
    answers, _ = answered(prompts, NEW_TOKENS + LONGEST_DRAFT + 1, None)
    return Setup(target, prompts, answers)


def answered(
    prompts: list[list[int]], new_tokens: int, speculative: dict[str, Any] | None
) -> tuple[list[list[int]], dict[str, Any]]:
    """Greedy answers of this length, and the counters of drafting."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(EMBEDDED_TARGET), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20, disable_log_stats=False, speculative_config=speculative,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            counters[name] = metric.values if hasattr(metric, "values") else metric.value
    del llm
    gc.collect()
    return [list(output.outputs[0].token_ids) for output in outputs], counters


@pytest.mark.parametrize("name", SERVED)
def test_served_as_in_our_decoder(name: str, setup: Setup, tmp_path: Path) -> None:
    kind, to, options = SERVED[name]
    drafter = briefly_trained(kind, options, setup.target, setup.prompts, setup.answers)
    made = export_drafter(drafter, to, tmp_path / "served", str(EMBEDDED_TARGET), tmp_path)
    speculative = speculative_config(drafter.config, str(tmp_path / "served"))
    answers, counters = answered(setup.prompts, NEW_TOKENS, speculative)
    assert answers == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted, _ = our_counts(drafter, setup)
    print(name, "vLLM:", counters, "ours:", rounds, accepted)
    assert made.num_speculative_tokens == len(accepted) == 3
    assert min(accepted) > 0
    assert (counters["drafts"], list(counters["accepted_tokens_per_pos"])) == (rounds, accepted)


def printed_command(drafter: Drafter, folder: Path) -> list[str]:
    """What `draftsmith export --to vllm` says last, of a run with this drafter."""
    recipe = recipe_in(folder, target={"model": "embedded", "dtype": "float32"}, drafter={"kind": "eagle3"})
    run = RunFolder(recipe)
    drafter.save_pretrained(run.drafter)
    hashes = weights_sha256(run.drafter)
    (run.drafter / TRAINING_FILE).write_text(json.dumps({"steps": 1, "history": [], "weights_sha256": hashes}))
    result = CliRunner().invoke(app, ["export", recipe_file(recipe), "--to", "vllm"])
    assert result.exit_code == 0, result.output
    return shlex.split(result.stdout.strip().splitlines()[-1])


def posted(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return bytes(response.read())


def counted(metrics: str, name: str) -> list[int]:
    """The values of a counter in /metrics, by position if it has any."""
    return [
        int(float(value)) for value in re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} (\S+)$", metrics, re.M)
    ]


def test_dflash2_by_the_engines_own_functions(setup: Setup) -> None:
    """Its runner needs Triton, which is not here: what vLLM adds to DFlash, on our weights, block by block."""
    from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv, _score_edges

    torch.manual_seed(2)
    options = {"block_size": 5, "num_layers": 1, "conv_kernel_size": 3, "selector_rank": 6, "selector_top_k": 4}
    drafter = load_drafter_class("dflash2").from_target(setup.target, options)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        conv, selector = drafter.layers[0].mlp_conv, drafter.candidate_selector
        x_bd = torch.randn(2, 5, 192)  # two blocks; ours stand depth by depth
        ours, deltas = conv.before(x_bd.transpose(0, 1).flatten(0, 1)[None])
        ours = conv.after(ours, deltas).unflatten(1, (5, 2))[0].transpose(0, 1).flatten(0, 1)
        kernels = conv.kernel_projection(x_bd.flatten(0, 1)).view(10, 2, 3, 12)
        theirs = x_bd.flatten(0, 1)
        for side in (0, 1):
            theirs = _grouped_conv(theirs, kernels[:, side], conv.base_kernel[side], 5, 12, 16, 3)
        torch.testing.assert_close(ours, theirs)
        normed, anchor = torch.randn(1, 4, 192), torch.tensor([7])
        values, tokens = drafter.head_logits(normed).topk(4)
        gates, tables = selector.gates(normed), (selector.predecessor_codebook, selector.successor_codebook)
        edges = _score_edges(*tables, tokens, values, gates, anchor, 4)
        before = [anchor.repeat(4), *tokens[0, :-1]]
        for depth in range(4):
            for place in range(4):
                scores = values[0, depth] + selector.edges(
                    gates[0, depth][None], before[depth][place][None], tokens[0, depth][None]
                )
                torch.testing.assert_close(scores[0], edges[0, depth, place])


def test_lilicorr_by_the_engines_own_head(setup: Setup, tmp_path: Path) -> None:
    """Its runner needs Triton too: vLLM's lattice takes an export's tensors by its own loader, and scores as ours."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.models.lilicorr import LiLiCorrHead
    from vllm.model_executor.models.utils import AutoWeightsLoader

    torch.manual_seed(2)
    options = {"block_size": 5, "num_layers": 1, "lattice_top_k": 4, "lattice_factor_dim": 20}
    drafter = load_drafter_class("lilicorr").from_target(setup.target, options)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made = EXPORTERS["lilicorr", "vllm"].write(drafter)
    tensors = {name.removeprefix("lilicorr."): value for name, value in made.tensors.items() if "lilicorr." in name}
    config = made.config
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{tmp_path / 'group'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        try:
            sizes = {"model_hidden_size": 192, "block_size": 5, "rms_norm_eps": config["rms_norm_eps"]}
            head = LiLiCorrHead(**sizes, config=config["dflash_config"])
            assert AutoWeightsLoader(head).load_weights(tensors.items()) == tensors.keys()
            head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
            for module in head.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
            for context in (torch.randn(192), torch.zeros(192)):  # one that there is, and none
                normed = torch.randn(4, 192)
                _, columns, log_q, scores, _ = drafter.rows_of(normed, context)
                there = (context != 0).any()[None]
                theirs = head(drafter.embedded(columns)[None], log_q[None], normed[None], context[None], there)
                torch.testing.assert_close(scores, theirs[0], atol=1e-5, rtol=1e-5)
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def test_the_printed_command_serves(setup: Setup, tmp_path: Path) -> None:
    """Over HTTP, all questions at once: plain vLLM's answers, our decoder's acceptance. And streamed."""
    kind, _, options = SERVED["eagle3"]
    drafter = briefly_trained(kind, options, setup.target, setup.prompts, setup.answers)
    server = VllmServer(tmp_path / "log", command=printed_command(drafter, tmp_path))
    try:
        asked = {"model": "embedded", "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        bodies = [{**asked, "prompt": ids, "return_token_ids": True} for ids in setup.prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = [
                json.loads(raw) for raw in pool.map(lambda body: posted(f"{server.url}/completions", body), bodies)
            ]
        with urllib.request.urlopen(server.url.replace("/v1", "/metrics"), timeout=60) as response:
            metrics = response.read().decode()
        streamed = posted(f"{server.url}/completions", {**asked, "prompt": setup.prompts[0], "stream": True}).decode()
    finally:
        server.stop()
    choices = [answer["choices"][0] for answer in answers]
    assert [choice["token_ids"] for choice in choices] == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted, _ = our_counts(drafter, setup)
    assert min(accepted) > 0
    assert (counted(metrics, "drafts"), counted(metrics, "accepted_tokens_per_pos")) == ([rounds], accepted)
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == choices[0]["text"]
