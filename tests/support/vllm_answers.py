"""Answers of real vLLM, here or in a separate process: python -m support.vllm_answers ASKED.json ANSWERED.json.

`check_served` compares them, and vLLM's counters, with plain vLLM and with our own decoder.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.served_drafters import NEW_TOKENS, Setup, count_our_rounds, load_embedded

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.exporting import export_drafter, speculative_config
from draftsmith.models.target.loading import EMBEDDED_TARGET

INTERPRETED = Path(__file__).parent / "interpreted_triton"
TRITON = Path(sys.prefix) / "triton"  # see .ci/vllm_env
LONGEST_DRAFT = 3
NEWER_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


@pytest.fixture(scope="module")
def setup() -> Setup:
    """Return the embedded target with plain vLLM's answers, longer than compared ones by a round."""
    target, _, prompts = load_embedded()
    return Setup(target, prompts, generate_answers(prompts, NEW_TOKENS + LONGEST_DRAFT + 1, None)[0])


def export_served(
    drafter: Drafter, folder: Path, to: str = "vllm", model: str = str(EMBEDDED_TARGET)
) -> dict[str, Any]:
    """Export a drafter into `folder/served` and return vLLM's `speculative_config` for it."""
    export_drafter(drafter, to, folder / "served", model, folder)
    return speculative_config(drafter.config, str(folder / "served"))


def check_served(
    drafter: Drafter,
    setup: Setup,
    folder: Path,
    speculative: dict[str, Any],
    newer_runner: bool = False,
    model: str = str(EMBEDDED_TARGET),
    **options: Any,
) -> None:
    """Check that answers are plain vLLM's, and rounds and accepted tokens by position our decoder's; all accept some.

    Args:
        newer_runner: Use vLLM's V2 runner; skips the test where its kernels cannot run.
    """
    if newer_runner and not has_triton():
        pytest.skip("Triton is not installed: make vllm-env")
    if newer_runner:
        answers, counters = generate_with_newer_runner(folder, setup.prompts, NEW_TOKENS, speculative)
    else:
        answers, counters = generate_answers(setup.prompts, NEW_TOKENS, speculative, model, **options)
    assert answers == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted, _ = count_our_rounds(drafter, setup)
    assert len(accepted) == speculative["num_speculative_tokens"] == LONGEST_DRAFT
    assert min(accepted) > 0
    assert (counters["drafts"], list(counters["accepted_tokens_per_pos"])) == (rounds, accepted)


def generate_answers(
    prompts: list[list[int]],
    new_tokens: int,
    speculative: dict[str, Any] | None,
    model: str = str(EMBEDDED_TARGET),
    stop: str | None = None,
    **options: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return greedy answers of this length or up to `stop`, and counters of drafting; `options` are vLLM's own."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False, speculative_config=speculative, **{"max_num_seqs": 16, **options},
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, stop=stop)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            counters[name] = metric.values if hasattr(metric, "values") else metric.value
    del llm
    gc.collect()
    return [list(output.outputs[0].token_ids) for output in outputs], counters


def has_triton() -> bool:
    """Return whether the newer runner is available."""
    return TRITON.is_dir()


def generate_with_newer_runner(folder: Path, *arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the same by vLLM's newer runner (see `interpreted_triton`); `arguments` are `generate_answers`'s."""
    (folder / "asked.json").write_text(json.dumps(arguments))
    path = os.pathsep.join(map(str, (INTERPRETED, INTERPRETED.parents[1], TRITON)))
    command = [sys.executable, "-m", "support.vllm_answers", str(folder / "asked.json"), str(folder / "answered.json")]
    subprocess.run(command, env=os.environ | NEWER_RUNNER | {"PYTHONPATH": path}, check=True)
    answers, counters = json.loads((folder / "answered.json").read_text())
    return answers, counters


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(generate_answers(*json.loads(Path(sys.argv[1]).read_text()))))
