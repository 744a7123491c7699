"""What a round costs in vLLM: the target's forward of one row and of a draft, the drafter, sampling, and the rest.

    PYTHON_OF_VLLM benchmarks/vllm_step.py TARGET [--drafter EXPORTED_FOLDER] [--dtype bfloat16] [--new-tokens 96]
        [--json FILE]

One request in one process, greedy, without the server. Times are medians over the steps after the prompt, in ms; what
is left of a step is vLLM's own work (scheduling, inputs, detokenising).
"""

import json
import os
import shlex
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts.timing import benchmark_parser, write_figures

PROMPTS = (
    "Explain in a few sentences why the sky is blue, and why sunsets are red.",
    "Write a short e-mail in which Anna asks Mr. Lopez to move their meeting from Tuesday to Thursday.",
    "What are the planets of the solar system, in order from the sun?",
)


def timed(calls: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose seconds are added to `calls[name]`."""

    def call(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            calls[name] = calls.get(name, 0.0) + time.perf_counter() - start

    return call


def measure(target: str, dtype: str, new_tokens: int, drafter: Path | None) -> dict[str, float]:
    """Return medians in ms by part of a step, the number of rows, and tau."""
    from vllm import LLM, SamplingParams

    speculative = None
    if drafter is not None:
        words = shlex.split(json.loads((drafter / "export.json").read_text(encoding="utf-8"))["command"])
        speculative = json.loads(words[words.index("--speculative-config") + 1])
    llm = LLM(
        model=target, dtype=dtype, enforce_eager=True, max_model_len=1024, kv_cache_memory_bytes=256 << 20,
        max_num_seqs=1, enable_prefix_caching=False, speculative_config=speculative,
    )  # fmt: skip
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    calls: dict[str, float] = {}
    parts = [
        (runner, "_model_forward", "target"),
        (runner.model, "compute_logits", "head"),
        (runner, "_sample", "sampling"),
    ]
    parts += [(runner.drafter, "propose", "drafter")] if drafter is not None else []
    for owner, attribute, name in parts:
        setattr(owner, attribute, timed(calls, name, getattr(owner, attribute)))
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    steps: list[dict[str, float]] = []
    tokens = 0
    for number, prompt in enumerate(PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        is_prompt = True
        while engine.has_unfinished_requests():
            calls.clear()
            start = time.perf_counter()
            outputs = engine.step()
            calls["step"] = time.perf_counter() - start
            if not is_prompt:
                steps.append(dict(calls))
                tokens += sum(len(output.outputs[0].token_ids) for output in outputs if output.finished)
            is_prompt = False
    medians = {name: 1000 * statistics.median(step.get(name, 0.0) for step in steps) for name in steps[0]}
    total_s = sum(step["step"] for step in steps)
    committed = tokens - len(PROMPTS)  # a prompt's step gives the first token
    return {
        "rows": 1 if speculative is None else speculative["num_speculative_tokens"] + 1,
        **medians,
        "rest": 2 * medians["step"] - sum(medians.values()),
        "tau": committed / len(steps),
        "tokens_per_s": committed / total_s,
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("target", help="folder of the target, as the printed command names it")
    parser.add_argument("--drafter", type=Path, help="folder that `draftsmith export --to vllm` wrote")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args()
    figures = measure(options.target, options.dtype, options.new_tokens, options.drafter)
    print("  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    write_figures(options, figures)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
