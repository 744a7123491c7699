"""ParallelSpec's drafter in real vLLM, by the plugin: what `test_vllm_serves.py` does not ask of every kind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.served_drafters import NEW_TOKENS, SERVED, Setup, count_our_rounds, load_embedded, train_briefly
from support.vllm_answers import generate_answers, generate_with_newer_runner, has_triton
from support.vllm_server import NEEDS_VLLM, vllm_environment
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.exporting import export_drafter, speculative_config
from draftsmith.models.target.loading import EMBEDDED_TARGET

__all__ = ["vllm_environment"]  # fixture
pytestmark = NEEDS_VLLM
LONGEST_DRAFT = 3


@pytest.fixture(scope="module")
def setup() -> Setup:
    target, _, prompts = load_embedded()
    answers, _ = generate_answers(prompts, NEW_TOKENS + LONGEST_DRAFT + 1, None)
    return Setup(target, prompts, answers)


@pytest.fixture(scope="module")
def drafter(setup: Setup) -> Drafter:
    kind, _, options = SERVED["parallel"]
    return train_briefly(kind, options, setup.target, setup.prompts, setup.answers)


@pytest.fixture
def served(drafter: Drafter, tmp_path: Path) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for the exported drafter."""
    export_drafter(drafter, "vllm", tmp_path / "served", str(EMBEDDED_TARGET), tmp_path)
    return speculative_config(drafter.config, str(tmp_path / "served"))


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_one_mask_a_forward_drafts_the_same(
    runner: str, drafter: Drafter, served: dict[str, Any], setup: Setup, tmp_path: Path
) -> None:
    """Without `parallel_drafting`, in both of vLLM's runners."""
    served.pop("parallel_drafting")
    if runner == "V2" and not has_triton():
        pytest.skip("Triton is not installed: make vllm-env")
    if runner == "V2":
        answers, counters = generate_with_newer_runner(tmp_path, setup.prompts, NEW_TOKENS, served)
    else:
        answers, counters = generate_answers(setup.prompts, NEW_TOKENS, served)
    assert answers == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, accepted, _ = count_our_rounds(drafter, setup)
    assert (counters["drafts"], list(counters["accepted_tokens_per_pos"])) == (rounds, accepted)


def test_cached_prefixes_and_chunks_of_prompts(drafter: Drafter, served: dict[str, Any], setup: Setup) -> None:
    """Cached prefixes are exact. At the end of a chunk vLLM gives a row a wrong token: other drafts, same answers."""
    whole = Setup(setup.target, setup.prompts * 2, setup.answers * 2)
    answers, counters = generate_answers(whole.prompts, NEW_TOKENS, served, enable_prefix_caching=True, max_num_seqs=2)
    assert answers == [answer[:NEW_TOKENS] for answer in whole.answers]
    rounds, accepted, _ = count_our_rounds(drafter, whole)
    assert (counters["drafts"], list(counters["accepted_tokens_per_pos"])) == (rounds, accepted)
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    answers, counters = generate_answers(setup.prompts, NEW_TOKENS, served, **chunks)
    assert answers == [answer[:NEW_TOKENS] for answer in setup.answers]
    assert rounds // 2 <= counters["drafts"] <= 1.1 * rounds / 2


def test_target_of_qwen2(tmp_path: Path) -> None:
    """A small random Qwen 2 target, whose attention has biases."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(AutoTokenizer.from_pretrained(EMBEDDED_TARGET)), hidden_size=128, intermediate_size=256,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in target.named_parameters():
        parameter.mul_(0.0 if name.endswith("bias") else 4.0)  # answers that vary
    target.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(EMBEDDED_TARGET).save_pretrained(tmp_path / "target")
    model, (_, _, prompts) = str(tmp_path / "target"), load_embedded()
    answers, _ = generate_answers(prompts, NEW_TOKENS + LONGEST_DRAFT + 1, None, model)
    options = {"num_masks": 2, "feature_layers": [1, -1], "mask_residual": True, "first_token": False}
    drafter = train_briefly("parallel", options, target, prompts, answers)
    export_drafter(drafter, "vllm", tmp_path / "served", model, tmp_path)
    drafted, counters = generate_answers(
        prompts, NEW_TOKENS, speculative_config(drafter.config, str(tmp_path / "served")), model
    )
    assert drafted == [answer[:NEW_TOKENS] for answer in answers]
    rounds, accepted, _ = count_our_rounds(drafter, Setup(target, prompts, answers))
    assert min(accepted) > 0
    assert (counters["drafts"], list(counters["accepted_tokens_per_pos"])) == (rounds, accepted)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("tensor", "the drafter's checkpoint lacks fuse_features.weight"),
        ("masks", "the drafter's checkpoint has 1 masks and its config.json says num_masks 2"),
        ("target", "was trained for a target with num_hidden_layers 9, and the served one has 8"),
        ("tokens", "num_speculative_tokens is 5, and this drafter has 2 masks: set it to at most 3"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(fault: str, sentence: str, served: dict[str, Any]) -> None:
    folder = Path(served["model"])
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if fault == "tensor":
        tensors.pop("fuse_features.weight")
    elif fault == "masks":
        tensors["masks"] = tensors["masks"][:1]
    elif fault == "target":
        config["target"]["num_hidden_layers"] = 9
    else:
        served["num_speculative_tokens"] = 5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        generate_answers([[1, 2, 3]], 2, served)


def test_the_plugin_imports_nothing_by_itself() -> None:
    code = (
        "import sys; from draftsmith.models.formats import vllm_plugin; "
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('torch', 'transformers', 'vllm')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
