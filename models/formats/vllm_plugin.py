"""vLLM's plugin for draftsmith's parallel drafters: it registers their architecture, and imports nothing by itself.

draftsmith in vLLM's environment is enough: vLLM calls `register` by the entry point
`vllm.general_plugins` in each of its processes, perhaps more than once.
"""

# vLLM's method `eagle3` keeps only names that begin so (`transformers_utils/configs/eagle.py`).
ARCHITECTURE = "Eagle3DraftsmithParallel"
MODEL = "draftsmith.models.formats.vllm_parallel:VllmParallelDrafter"


def register() -> None:
    """Register the architecture with vLLM, which imports its class when a drafter of it is loaded."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)
