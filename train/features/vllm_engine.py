"""Features by vLLM's own extraction of hidden states, on a GPU, turned into rows of our cache.

vLLM's speculative method `extract_hidden_states` drafts nothing: it keeps the residual streams of some layers beside
the KV cache, and `ExampleHiddenStatesConnector` writes one safetensors file a request, `hidden_states` [S, L, D] and
`token_ids` [S]. vLLM numbers the streams as we do (k = after k layers) and gives them in ascending order, without the
final norm: for the features that the LM head reads we ask for the stream after the last layer, and norm it here.

This has never run. It is written from the sources of vLLM 0.32, whose connector copies on CUDA streams and so writes
nothing on a CPU; what has been tested is the conversion of files in its format.

Shapes: S tokens of a row, L layers, D hidden, F features.
"""

import importlib
import importlib.util
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.models.target.loading import target_location
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetRecipe

CONNECTOR = "ExampleHiddenStatesConnector"
CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


def refuse_without_vllm() -> None:
    """Check that vLLM can extract hidden states here.

    Raises:
        UserError: It is not installed, or there is no GPU.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError("data.features.engine vllm needs vLLM: pip install 'draftsmith[vllm]', or use transformers")
    if not torch.cuda.is_available():
        raise UserError(
            "data.features.engine vllm needs a CUDA device, since without one vLLM writes no hidden states: use "
            "data.features.engine=transformers"
        )


class VllmFeatures:
    """A `FeatureEngine` that hands its rows to vLLM.

    Args:
        recipe: What vLLM loads, onto its own device.
        target: The same model, on the CPU: for its dtype and its final norm.
        layers: Ids of `draftsmith.models.target.features.FeatureTap`.
        longest_tokens: Of all rows.
        folder: Where vLLM may put its files, each for a moment.

    Raises:
        UserError: The target's final norm cannot be found.
    """

    def __init__(
        self,
        recipe: TargetRecipe,
        target: PreTrainedModel,
        layers: tuple[int, ...],
        longest_tokens: int,
        folder: Path,
    ) -> None:
        self._layers, self._num_layers = layers, target.config.get_text_config().num_hidden_layers
        self._norm: Any = getattr(target.base_model, "norm", None)
        if self._norm is None:
            raise UserError(
                f"the final norm of {type(target).__name__} cannot be found: use data.features.engine=transformers"
            )
        files = folder / "vllm.partial"
        shutil.rmtree(files, ignore_errors=True)  # of a run that was killed
        files.mkdir(parents=True)
        weakref.finalize(self, shutil.rmtree, files, ignore_errors=True)
        asked = vllm_layers(layers, self._num_layers)
        self._vllm: Any = importlib.import_module("vllm")
        self._llm = self._vllm.LLM(
            model=target_location(recipe),
            revision=recipe.revision,
            trust_remote_code=recipe.trust_remote_code,
            dtype=str(target.dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            max_model_len=longest_tokens + 1,  # the one token that must be generated
            enable_prefix_caching=False,  # a cached prefix is not computed, and would have no hidden states
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": asked}},
            },
            kv_transfer_config={
                "kv_connector": CONNECTOR,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(files)},
            },
        )

    def features(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """All rows at once: vLLM makes its own batches.

        Raises:
            UserError: vLLM left no file for a row, or one of other tokens.
        """
        connector: Any = importlib.import_module(CONNECTOR_MODULE)
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        one_token = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        for number, output in enumerate(self._llm.generate(prompts, one_token, use_tqdm=False)):
            path = output.kv_transfer_params["hidden_states_path"]
            try:
                written = connector.load_hidden_states(path)  # waits for vLLM's writer
            except (OSError, SafetensorError) as error:
                raise UserError(f"vLLM left no hidden states in {path} ({error}): see what it logged") from None
            connector.cleanup_hidden_states(path)
            yield number, row_features(written, rows[number], self._layers, self._num_layers, self._norm)


def vllm_layers(layers: tuple[int, ...], num_layers: int) -> list[int]:
    """The streams to ask vLLM for, in the order in which it gives them."""
    return sorted({num_layers if layer == FINAL_FEATURES else layer for layer in layers})


@torch.no_grad()
def row_features(
    written: dict[str, Tensor], row: Sequence[int], layers: tuple[int, ...], num_layers: int, norm: nn.Module
) -> Tensor:
    """[S, F] from what vLLM wrote for a row: `hidden_states` [S, L, D] of `vllm_layers`, `token_ids` [S].

    Raises:
        UserError: That is not this row, or not these layers.
    """
    asked, hidden_sld = vllm_layers(layers, num_layers), written["hidden_states"]
    if written["token_ids"].tolist() != list(row) or hidden_sld.shape[:2] != (len(row), len(asked)):
        raise UserError(
            f"vLLM wrote hidden states of shape {list(hidden_sld.shape)} for a row of {len(row)} tokens and "
            f"{len(asked)} layers, or of other tokens: use data.features.engine=transformers"
        )
    streams = dict(zip(asked, hidden_sld.unbind(1), strict=True))
    parts = [norm(streams[num_layers]) if layer == FINAL_FEATURES else streams[layer] for layer in layers]
    return torch.cat(parts, dim=-1)
