"""The page of kinds and formats, `reference/formats.md` in the site that `make docs` builds, made of the rules."""

from typing import Any

from transformers import AutoConfig

from draftsmith.models.base.registry import drafter_kinds, load_drafter_class
from draftsmith.models.formats.served import EXPORTERS, FORMATS, LOADED_IN_VLLM, no_place, refusal

# Drafters that a format refuses though it takes their kind: kind, the target's architecture, options, in words.
CONDITIONS: list[tuple[str, str, dict[str, Any], str]] = [
    ("eagle", "llama", {"fc_bias": True}, "`fc_bias: true`"),
    ("eagle", "llama", {"draft_vocab_size": 100}, "a draft vocabulary"),
    ("eagle", "qwen2", {}, "a Qwen 2 target"),
    ("eagle", "qwen3", {}, "a Qwen 3 target"),
    ("eagle", "phi3", {}, "a Phi-3 target"),
    ("eagle3", "llama", {"feature_layers": [1, 2]}, "two layers of the target"),
    ("eagle3", "llama", {"feature_layers": [0, 1, 2]}, "the embeddings among its layers"),
    ("eagle3", "llama", {"norm_before_residual": True}, "`norm_before_residual: true`"),
    ("eagle3", "llama", {"fc_norm": True}, "`fc_norm: true`"),
    ("eagle3", "llama", {"norm_before_fc": True}, "`norm_before_fc: true`"),
    ("eagle3", "llama", {"norm_output": True}, "`norm_output: true`"),
    ("eagle3", "qwen2", {}, "a Qwen 2 target"),
    ("eagle3", "qwen3", {}, "a Qwen 3 target"),
    ("eagle3", "gemma", {}, "a Gemma target"),
    ("parallel", "llama", {}, "distinct masks"),
    ("parallel", "llama", {"shared_mask": True}, "features among its inputs"),
    ("parallel", "llama", {"shared_mask": True, "inputs": "embedding", "mask_residual": True}, "`mask_residual: true`"),
    ("parallel", "llama", {"shared_mask": True, "inputs": "embedding", "markov_rank": 1}, "a Markov head"),
    ("peagle", "llama", {"markov_rank": 1}, "a Markov head"),
    ("dflash", "llama", {"draft_vocab_size": 100}, "a draft vocabulary"),
    ("dflash", "llama", {"mask_residual": True}, "`mask_residual: true`"),
    ("dflash", "llama", {"markov_rank": 1}, "a Markov head"),
    ("dflash", "llama", {"sample_from_anchor": True}, "`sample_from_anchor: true`"),
    ("dflash", "llama", {"causal": True}, "`causal: true`"),
    ("dflash", "gemma", {}, "a Gemma target"),
    ("dspark", "llama", {"draft_vocab_size": 100}, "a draft vocabulary"),
    ("dspark", "llama", {"sample_from_anchor": False}, "`sample_from_anchor: false`"),
    ("dspark", "llama", {"causal": True}, "`causal: true`"),
    ("dspark", "gemma", {}, "a Gemma target"),
    ("medusa", "llama", {"draft_vocab_size": 100}, "a draft vocabulary"),
    ("medusa", "llama", {"lm_heads": "shared"}, "`lm_heads: shared`"),
    ("hydra", "llama", {}, "`embedding_norm: true`"),
    ("hydra", "llama", {"prefix_attention": True}, "`prefix_attention: true`"),
    ("hydra", "llama", {"embedding_norm": False, "num_layers": 4}, "more than two blocks a head"),
    ("draft_model", "llama", {"draft_vocab_size": 100}, "a draft vocabulary"),
]
HEAD = """# Where a drafter can go

Which engine or other code loads which kind of drafter, how that was verified, or why not and what to train instead.

Made by `make docs` from the rules that `draftsmith export` and `draftsmith doctor`
apply; a test keeps it so.

    draftsmith doctor mine.yaml --serve vllm                 # before training: can it be served, how, or why not
    draftsmith export mine.yaml --to vllm                    # after it: the folder, and the command that serves it
    draftsmith import mine.yaml --from user/repo             # a published checkpoint as this run's drafter

Every export is held against its reader's rules (names, shapes, config; read from the reader's source, which the rules
name), its config against the target's, and its values, read back, against the drafter's. *Real vLLM* means more: vLLM
0.32 loads the folder, no greedy token changes, and at every position it accepts as often as our decoder's chain
(`tests/models/formats/test_vllm_serves.py`: on a CPU, for the embedded target, a Llama, with `first_token: false` where
a drafter has that option; with a row for the first token, which engines have not, a few drafts differ). Of DFlash that
holds for layers that share a norm of keys: on a CPU vLLM norms those of all layers with the first layer's weight.
DSpark needs vLLM's newer runner, so a GPU. Qwen's classes in vLLM, vLLM 0.33 and SGLang were not run. The way to a
running server, and what goes wrong: [serving.md](../guides/serving.md).
"""


def table() -> str:
    """The page."""
    columns = " | ".join(f"`--to {to}` ({what})" for to, what in FORMATS.items())
    lines = [HEAD, f"| kind | {columns} |", "|---|" + "---|" * len(FORMATS)]
    for kind in drafter_kinds():
        cells = " | ".join(_cell(kind, to) for to in FORMATS)
        lines.append(f"| `{kind}` | {cells} |")
    lines += ["", "What a format takes of a kind depends on its options and on the target:", ""]
    lines += ["| kind | with | `--to` | refused, and what to train with |", "|---|---|---|---|"]
    for kind, model_type, options, words in CONDITIONS:
        said: dict[str, list[str]] = {}
        for to in FORMATS:
            refused = _refused(kind, model_type, options, to) if (kind, to) in EXPORTERS else None
            if refused is not None:
                said.setdefault(refused, []).append(to)
        lines += [f"| `{kind}` | {words} | {', '.join(formats)} | {why} |" for why, formats in said.items()]
    return "\n".join(lines) + "\n"


def _cell(kind: str, to: str) -> str:
    exporter = EXPORTERS.get((kind, to))
    if exporter is None:
        return f"no: {no_place(kind, to).sentence()}"
    served = (
        f"as `{exporter.method}`" + (" with `parallel_drafting`" if exporter.parallel else "")
        if exporter.method
        else "yes"
    )
    return f"{served}; {'real vLLM' if (kind, to) in LOADED_IN_VLLM else 'checked by the rules'}"


def _refused(kind: str, model_type: str, options: dict[str, Any], to: str) -> str | None:
    target_config = AutoConfig.for_model(model_type, num_hidden_layers=8).to_dict()
    config = load_drafter_class(kind).config_class(target_config=target_config, **options)
    refused = refusal(config, to)
    return None if refused is None else refused.sentence()
