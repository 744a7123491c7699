"""Keys, values, shipped recipes and command-line options that this release removed, each with what to use instead.

An entry stays for one release, so that a recipe, run folder or checkpoint of the release before is never misread.
"""

from typing import Any, NamedTuple


class Removed(NamedTuple):
    """Advice for a removed key, value, recipe or option. unset: values that meant the same as no key."""

    instead: str  # end of the sentence "... was removed: "
    unset: tuple[Any, ...] = (None,)  # values that changed nothing; resolved recipes hold them, so they are dropped


_KINDS = (
    "dflash", "dflash2", "draft_model", "dspark", "eagle", "eagle3", "eagle_parallel", "hydra", "medusa", "medusa2",
    "peagle",
)  # fmt: skip
_SMOLLM2, _REDUCED = "smollm2-135m", "drafter.options.draft_vocab_size=16384"
# A dotted key; `key=value` for one value of a key that stays; `recipe=NAME` for a shipped recipe; `COMMAND --OPTION`.
REMOVED: dict[str, Removed] = {
    "data.conversations.columns.input": Removed("name it after the first column, as `prompt: [instruction, input]`"),
    "data.conversations.contamination_words": Removed("leave it out: 13, as in GPT-3's paper", unset=(13,)),
    "data.conversations.filters": Removed("filter the file before distilling", unset=({},)),
    "data.conversations.filters.languages": Removed("filter the file before distilling", unset=([],)),
    "data.conversations.filters.min_turns": Removed("filter the file before distilling", unset=(1,)),
    "data.conversations.filters.min_turn_chars": Removed("filter the file before distilling", unset=(1,)),
    "data.conversations.filters.max_turn_chars": Removed("filter the file before distilling"),
    "data.conversations.filters.max_turns": Removed("filter the file before distilling"),
    "data.conversations.filters.max_tokens": Removed("filter the file before distilling"),
    "data.loops": Removed("leave it out: answers are learned whole", unset=(None, "keep")),
    "data.too_long": Removed("leave it out: an answer is learned up to the end of its row", unset=(None, "cut")),
    "data.reasoning": Removed(
        "distil without thoughts if you serve without them: target.chat_template_kwargs={enable_thinking: false}",
        unset=(None, "learn"),
    ),
    "drafter.init_vocabulary": Removed("leave it out: it is always `extended`", unset=(None, "own", "extended")),
    "data.features.sharded": Removed(
        "serve a target that no GPU holds by vLLM, and set data.features.source=server", unset=(None, False)
    ),
    "data.features.autocast": Removed("set target.dtype=bfloat16", unset=(None, False)),
    "data.distill.options.extensions": Removed(
        "use vLLM, SGLang or llama-server, which take the fields that only vLLM has", unset=(True,)
    ),
    "data.distill.options.api": Removed(
        "servers get the prompt as token ids: use vLLM, SGLang or llama-server", unset=("completions",)
    ),
    "serve --rollback": Removed("delete the newest folder of learned/drafters/; the one before it serves then"),
    "serve --at-once": Removed("`serve` gives one answer at a time, the others wait in order; for more use vLLM"),
    "serve --start": Removed("run the command that `draftsmith serve RECIPE --features` prints"),
    "features --yes": Removed("leave it out: the size is printed, and checked against the disk"),
    "bench --llama-server": Removed("add its folder to PATH"),
    "doctor --overfit": Removed("`doctor`'s check `train = decode` and `draftsmith bench` find the same mistakes"),
    "drafter.options.dpace_alpha": Removed("use `until_first_error: true`"),
    "drafter.options.teacher_mass": Removed("leave it out", unset=(True, False)),
    "drafter.options.loss=lk_alpha": Removed("use `tv`, also in the config.json of a drafter trained with it"),
    "drafter.options.loss=lk_lambda": Removed("use `kl`, also in the config.json of a drafter trained with it"),
    "eval.methods.tree=adaptive": Removed("use `tree: tuned`, the fastest tree that `draftsmith tune` finds"),
    "eval --processes": Removed("`eval` measures on one GPU; eval.limit_per_category makes it shorter"),
    "eval --engine": Removed("use `draftsmith bench RECIPE --engine NAME`, which takes the same options"),
    "compare --vary": Removed(
        'give each value with the recipe in quotes, as `draftsmith compare "quickstart drafter.options.num_masks=2"`'
    ),
    "plan --utilisation": Removed("hours assume 0.4 of --peak-tflops; scale that, or use --measure"),
    "plan --labelled-share": Removed("distil first, then `plan` counts the labels of the run's data"),
    "validation": Removed("set train.load_best_model_at_end=true to keep the best weights", unset=({},)),
    "validation.keep": Removed("set train.load_best_model_at_end=true for `best`", unset=("last",)),
    "validation.patience": Removed("leave it out"),
    "data.train_answer_tokens": Removed("`train.num_train_epochs: 0.5` trains on half of the data, once"),
    "drafter.kind=lilicorr": Removed("use dflash2"),
    "export.to=eagle": Removed("export to vllm or sglang"),
    "export.to=medusa": Removed("export to vllm"),
    "export.to=hydra": Removed("no engine serves Hydra; `draftsmith serve` does"),
    **{f"recipe=embedded-{kind}": Removed(f"use `quickstart drafter.kind={kind}`") for kind in _KINDS},
    **{f"recipe={_SMOLLM2}-{kind}": Removed(f"use `{_SMOLLM2} drafter.kind={kind} {_REDUCED}`") for kind in _KINDS},
    "recipe=embedded-parallel": Removed("use quickstart"),
    "recipe=embedded-pass": Removed("use `quickstart drafter.kind=pass_embeddings train.optimizer=adamw`"),
    "recipe=embedded-jetspec": Removed("use `quickstart drafter.kind=dflash drafter.options.causal=true`"),
    "recipe=embedded-lilicorr": Removed("use `quickstart drafter.kind=dflash2`"),
    "recipe=embedded-two_stage": Removed("use smollm2-135m-two_stage, with your `target` and `data`"),
    "recipe=smollm2-135m-parallel": Removed("use smollm2-135m"),
    "recipe=smollm2-135m-pass": Removed("use `smollm2-135m drafter.kind=pass_embeddings train.optimizer=adamw`"),
    "recipe=smollm2-135m-markov": Removed("use `smollm2-135m drafter.options.markov_rank=64`"),
    "recipe=smollm2-135m-lilicorr": Removed(f"use `smollm2-135m drafter.kind=dflash2 {_REDUCED}`"),
    "recipe=smollm2-135m-medusa_shared": Removed(
        f"use `smollm2-135m drafter.kind=medusa drafter.options.lm_heads=shared {_REDUCED}`"
    ),
    "recipe=qwen3-8b-lilicorr": Removed("use qwen3-8b-dflash2"),
    "recipe=llama3-8b-eagle-parallel": Removed("use llama3-8b-parallel, which begins with the overrides for it"),
    "recipe=llama2-7b-chat-eagle_parallel": Removed("use vicuna-7b-eagle_parallel with Llama 2 as `target.model`"),
    "recipe=llama2-7b-chat-medusa_parallel": Removed("use vicuna-7b-medusa_parallel with Llama 2 as `target.model`"),
}


def removal_of(key: str, value: str | None = None) -> str | None:
    """Return the message for a removed key, or for a removed value of a key; None if neither was removed.

    Args:
        key: Dotted key of the recipe, `recipe` for the name of a shipped recipe, or a command with its option.
    """
    removed = REMOVED.get(key if value is None else f"{key}={value}")
    if removed is None:
        return None
    return f"`{key if value is None else value}` was removed: {removed.instead}"


def drop_unset(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Return recipe values without the removed keys whose value had no effect, so that older recipes still load.

    Args:
        section: Dotted key of `values` in the recipe; empty for a whole recipe.
    """
    kept = {}
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        left = drop_unset(value, key) if isinstance(value, dict) else value
        if key not in REMOVED or left not in REMOVED[key].unset:
            kept[name] = left
    return kept
