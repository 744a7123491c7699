"""Tokens per second of `draftsmith serve` over HTTP with one and several clients, and of the bare decoding loop.

    python benchmarks/serving.py [--recipe R] [--clients 1 2 4] [--questions 8] [--new-tokens 96] [--json FILE]

The server is started as a separate process and idles while the loop runs in this one; they take turns. All get the same
questions, greedily; the clients share them. Every answer must equal the loop's, whatever the other clients.
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from parts.timing import benchmark_parser, write_figures

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.eval.bench.costs import MeasuredCosts
from draftsmith.eval.bench.measured_methods import compile_decoder, load_models
from draftsmith.eval.commands.artifacts import with_tuned_trees
from draftsmith.eval.commands.demo import shipped_recipe
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.loading import load_recipe

PORT = 8791
LENGTH = 1024


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--recipe")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    recipe = with_tuned_trees(shipped_recipe() if options.recipe is None else load_recipe(options.recipe))
    command = [sys.executable, "-m", "draftsmith.eval.commands.cli", "serve", "--port", str(PORT)]
    command += [] if options.recipe is None else [options.recipe]
    command += ["--at-once", str(max(options.clients))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        figures = measured(recipe, options)
    finally:
        server.terminate()
        server.wait()
    write_figures(options, figures)


def measured(recipe: Any, options: Any) -> dict[str, Any]:
    target, tokenizer, drafters = load_models(recipe)
    ((_, drafter),) = drafters.items()
    questions = [question.turns[0] for question in load_questions("embedded")][: options.questions]
    prompts = [prompt_token_ids(tokenizer, [Turn("user", text)]) for text in questions]
    end_ids = answer_end_ids(target.generation_config, tokenizer)
    with open_session(target, LENGTH, recipe.eval.compile) as session:
        session.read_layers(drafter.feature_layers)
        decoder = compile_decoder(recipe, drafter.decoder(LENGTH))
        method = build_tree_drafter(recipe.eval.methods[0], decoder, Sampling())
        MeasuredCosts(session, prompts[0]).set_costs(method)

        def loop() -> list[str]:
            answers = [generate(session, method, ids, Sampling(), options.new_tokens, end_ids).ids for ids in prompts]
            lengths["loop"] = sum(map(len, answers))
            return [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]

        def one(text: str) -> tuple[str, int]:
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": options.new_tokens}
            response = posted(body)
            return response["choices"][0]["message"]["content"], response["usage"]["completion_tokens"]

        def clients(count: int) -> list[str]:
            with ThreadPoolExecutor(count) as pool:
                answers = list(pool.map(one, questions))
            lengths[f"clients_{count}"] = sum(tokens for _, tokens in answers)
            return [text for text, _ in answers]

        lengths, rates = dict[str, int](), dict[str, list[float]]()
        wait_for_server()
        ways: dict[str, Any] = {"loop": loop}
        ways |= {f"clients_{count}": lambda count=count: clients(count) for count in options.clients}
        expected = loop()
        for run in range(options.runs + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                assert way() == expected, name
                if run:  # the first is to warm up
                    rates.setdefault(name, []).append(lengths[name] / (time.perf_counter() - began))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    loop_ratios = {}
    for name, each in rates.items():
        ratios = [rate / loops for rate, loops in zip(each, rates["loop"], strict=True)]
        loop_ratios[name] = statistics.median(ratios)
        spread = f"{loop_ratios[name]:.2f} of the loop ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name}: {medians[name]:.1f} tokens/s, {spread}")
    return {
        "tokens_per_s": rates,
        "median": medians,
        "of_the_loop": loop_ratios,
        "questions": len(questions),
        "new_tokens": options.new_tokens,
    }


def posted(body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read())


def wait_for_server() -> None:
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
