"""vLLM servers of a target's hidden states, started by `draftsmith serve RECIPE --features` or for distilling."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datasets import Dataset

from draftsmith.data.distill.token_dataset import load_tokens, row_lengths
from draftsmith.data.engines.engine import SERVED_NAME, engine_options
from draftsmith.data.engines.vllm_engine import command_line
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.templates import PROBE
from draftsmith.errors import UserError
from draftsmith.models.formats.exporting import loading_words
from draftsmith.models.target.features import required_layers
from draftsmith.models.target.loading import load_ends, target_location
from draftsmith.models.target.view import target_value
from draftsmith.models.target.windows import rope_switch
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.features.served import ServedFeatures
from draftsmith.train.features.stored import check_offline_support, served_layers
from draftsmith.train.features.write import models_without_weights

CONNECTOR, MODULE = "HiddenStatesConnector", "draftsmith.data.engines.vllm_hidden_states"
MIN_FREE_BYTES = 1 << 30  # of the disk of `data.features.server.folder`


def check_answering_servers(recipe: Recipe, tokenizer: Any) -> Path:
    """Check that the servers of `data.distill.features` serve this target; return the folder for hidden states.

    Raises:
        UserError: The kind needs the target in training, no LM head can be read, or a server fails `check_servers`.
    """
    check_offline_support(recipe)
    asked = recipe.model_copy(deep=True)
    asked.data.features.server.urls = engine_options(recipe).base_urls
    layers = required_layers(models_without_weights(recipe)[1])
    prompt = Dataset.from_dict({"input_ids": [prompt_token_ids(tokenizer, PROBE[:1])]})
    served = ServedFeatures(asked, prompt, load_ends(recipe.target), layers)
    served.check_servers([0])
    return served.folder


def server_command(recipe: Recipe) -> list[str]:
    """Return the command line that starts a vLLM server of features on the port of the first URL, or on 8000.

    Raises:
        UserError: The drafter cannot be trained on features from servers, or the target's config cannot be read.
    """
    urls = recipe.data.features.server.urls
    port = (urlsplit(urls[0]).port if urls else None) or 8000
    recipe = recipe.model_copy(deep=True)
    recipe.data.distill.model = None  # the target itself is served, not the copy of it that answers
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", *loading_words(recipe, "vllm")]
    return [*words, *command_line({**server_arguments(recipe), "served_model_name": SERVED_NAME, "port": port})]


def server_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return vLLM's arguments, by name, for a server that writes the target's hidden states.

    `max_model_len` is the length of the run's longest example, or `data.max_length_tokens` before there are examples
    (plus that of an answer if the server also distils), and one token more, which vLLM generates.

    Raises:
        UserError: The drafter cannot be trained on features from servers, or the target's config cannot be read, or its
            RoPE changes within `max_model_len`.
    """
    check_offline_support(recipe)
    target, drafter = models_without_weights(recipe)
    layers = served_layers(required_layers(drafter), target_value(target.config, "num_hidden_layers"))
    longest_tokens = recipe.data.max_length_tokens
    if (RunFolder(recipe).data / "tokens").is_dir():
        longest_tokens = max(row_lengths(load_tokens(RunFolder(recipe))))
    elif recipe.data.distill.features:  # it answers too
        longest_tokens += recipe.data.distill.max_new_tokens
    switch = rope_switch(target)
    if switch is not None and longest_tokens >= switch:
        raise UserError(
            f"vLLM would read every text with the RoPE of long ones, as max_model_len={longest_tokens + 1} exceeds "
            f"{switch}: lower data.max_length_tokens (and data.distill.max_new_tokens, if the server also distils), "
            "or set data.features.source=online"
        )
    drafting = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    extra = {
        "shared_storage_path": str(Path(recipe.data.features.server.folder).absolute()),
        "use_synchronization_lock": False,
        "min_free_bytes": MIN_FREE_BYTES,
    }
    writing = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    return {
        "model": target_location(recipe.target),
        "max_model_len": longest_tokens + 1,
        "speculative_config": drafting,
        "kv_transfer_config": writing,
    }
