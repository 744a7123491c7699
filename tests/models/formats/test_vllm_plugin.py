"""ParallelSpec's drafter in real vLLM, by the plugin: what `test_vllm_serves.py` does not ask of every kind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.served_drafters import NEW_TOKENS, SERVED, Setup, count_our_rounds, train_briefly
from support.vllm_answers import LONGEST_DRAFT, check_served, export_served, generate_answers, setup
from support.vllm_server import NEEDS_VLLM, vllm_environment
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.target.loading import EMBEDDED_TARGET

__all__ = ["setup", "vllm_environment"]  # fixtures
pytestmark = NEEDS_VLLM


def train(name: str, setup: Setup) -> Drafter:
    kind, _, options = SERVED[name]
    return train_briefly(kind, options, setup.target, setup.prompts, setup.answers)


@pytest.fixture(scope="module")
def drafter(setup: Setup) -> Drafter:
    return train("parallel", setup)


@pytest.fixture
def served(drafter: Drafter, tmp_path: Path) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for the exported drafter."""
    return export_served(drafter, tmp_path)


@pytest.mark.parametrize(
    ("name", "newer_runner"), [("parallel", False), ("parallel", True), ("parallel-reduced", False)]
)
def test_one_mask_a_forward_drafts_the_same(
    name: str, newer_runner: bool, drafter: Drafter, setup: Setup, tmp_path: Path
) -> None:
    """Without `parallel_drafting`, in both of vLLM's runners; once with a Markov head and a draft vocabulary."""
    drafter = drafter if name == "parallel" else train(name, setup)
    served = export_served(drafter, tmp_path)
    served.pop("parallel_drafting")
    check_served(drafter, setup, tmp_path, served, newer_runner)


def test_stop_strings(served: dict[str, Any], setup: Setup) -> None:
    """A stop string that ends in the middle of an answer cuts a drafted answer where it cuts a plain one."""
    stop = AutoTokenizer.from_pretrained(EMBEDDED_TARGET).decode(setup.answers[0][10:13])
    plain, drafted = (generate_answers(setup.prompts, NEW_TOKENS, config, stop=stop)[0] for config in (None, served))
    assert drafted == plain
    assert len(plain[0]) <= 13


def test_cached_prefixes_and_chunks_of_prompts(
    drafter: Drafter, served: dict[str, Any], setup: Setup, tmp_path: Path
) -> None:
    """Cached prefixes are exact. At the end of a chunk vLLM gives a row a wrong token: other drafts, same answers."""
    twice = Setup(setup.target, setup.prompts * 2, setup.answers * 2)
    check_served(drafter, twice, tmp_path, served, enable_prefix_caching=True, max_num_seqs=2)
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    answers, counters = generate_answers(setup.prompts, NEW_TOKENS, served, **chunks)
    assert answers == [answer[:NEW_TOKENS] for answer in setup.answers]
    rounds, _, _ = count_our_rounds(drafter, setup)
    assert rounds <= counters["drafts"] <= 1.1 * rounds


def test_target_of_qwen2(setup: Setup, tmp_path: Path) -> None:
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
    model = str(tmp_path / "target")
    answers, _ = generate_answers(setup.prompts, NEW_TOKENS + LONGEST_DRAFT + 1, None, model)
    options = {"num_masks": 2, "feature_layers": [1, -1], "mask_residual": True, "first_token": False}
    drafter = train_briefly("parallel", options, target, setup.prompts, answers)
    of_qwen = Setup(target, setup.prompts, answers)
    check_served(drafter, of_qwen, tmp_path, export_served(drafter, tmp_path, model=model), model=model)


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
