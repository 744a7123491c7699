"""Draft models for speculative decoding: distil answers, train a drafter, measure it without changing the output.

From Python, `load_recipe`, `load_target`, `load_drafter` and `SpeculativeDecoder` are enough; each is imported when it
is first used. The rest of this folder belongs to no stage: errors, files, provenance, progress, results, the Hub, child
processes (`parent`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.eval.speculative_decoder import SpeculativeDecoder
    from draftsmith.models.base.registry import load_drafter
    from draftsmith.models.target.loading import load_target
    from draftsmith.recipes.loading import load_recipe
    from draftsmith.recipes.schema import TargetRecipe

    __version__: str

__all__ = ["SpeculativeDecoder", "TargetRecipe", "__version__", "load_drafter", "load_recipe", "load_target"]

_MODULES = {
    "SpeculativeDecoder": "draftsmith.eval.speculative_decoder",
    "TargetRecipe": "draftsmith.recipes.schema",
    "load_drafter": "draftsmith.models.base.registry",
    "load_recipe": "draftsmith.recipes.loading",
    "load_target": "draftsmith.models.target.loading",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import draftsmith` must not import torch."""
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("draftsmith")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
