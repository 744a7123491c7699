"""A chat template that does not end or fills the memory is one sentence; others are unaffected."""

import multiprocessing
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import tiny_tokenizers as templates
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens import bounded
from draftsmith.data.tokens.bounded import EndlessTemplate
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.templates import template_calls
from draftsmith.errors import UserError

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WRITING = ENDLESS.replace("{% endfor %}{% endfor %}", "x{% endfor %}{% endfor %}")
DOUBLING = (
    "{% set n = namespace(x='" + "x" * 1000 + "') %}{% for a in range(17) %}{% set n.x = n.x + n.x %}{% endfor %}"
)
HOLDING = DOUBLING + ENDLESS  # 131 MB
HELLO = [Turn("user", "Hello")]


@pytest.mark.parametrize("template", [ENDLESS, WRITING])
def test_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(bounded, "WITHIN_S", 0.2)
    began = time.monotonic()
    for attempt in (prompt_token_ids, lambda tokenizer, _: template_calls(tokenizer)):
        with pytest.raises(
            EndlessTemplate, match=r"does not end within 0.2 s, .*: correct it, or set target.chat_templ"
        ):
            attempt(tiny_tokenizer(template), HELLO)
    assert time.monotonic() - began < 30
    assert prompt_token_ids(tiny_tokenizer(templates.CHATML), HELLO)  # later code is not interrupted


def test_template_that_fills_the_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_GROWTH_BYTES", 64 << 20)
    began = time.monotonic()
    with pytest.raises(EndlessTemplate):
        prompt_token_ids(tiny_tokenizer(HOLDING), HELLO)
    assert time.monotonic() - began < bounded.WITHIN_S / 2


@pytest.mark.parametrize(
    "expression",
    [
        "(n ** (n ** n)) % 7", "(9 ** (9 ** 9)) // 3", "2 ** 60000 * 2 ** 60000", "1.5 | round(99999999, 'ceil')",
        "('f' * 20000000) | int(0, 16) % 7", "range(100000) | map('list') | sum(start=[])",
        "'a' * 3000000000", "[0] * 3000000000", "'a'.center(3000000000)", "'a' | center(3000000000)",
        "'%3000000000d' % 1", "'%*d' % (3000000000, 1)", "'{:3000000000}'.format(1)", "'{:{}}'.format(1, 3000000000)",
        "'a' | indent(3000000000, true)", "('a' * 99999).replace('a', 'b' * 99999)",
        "['a'] | batch(3000000000, 0) | list",
        "([0] * 99999) | join('b' * 99999)", "'\\t'.expandtabs(2000000000)", "(1).to_bytes(3000000000, 'big')",
        "[0] | tojson(indent=3000000000)",
    ],
)  # fmt: skip
def test_no_single_operation_takes_long_or_fills_the_memory(expression: str) -> None:
    """The watching thread cannot interrupt it."""
    began, limit = time.monotonic(), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(EndlessTemplate):
        prompt_token_ids(tiny_tokenizer("{% set n = 9 %}{{ (" + expression + ") }}"), HELLO)
    assert time.monotonic() - began < 10
    assert resource.getrlimit(resource.RLIMIT_AS) == limit
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 << 20  # KiB


def test_limit_works_in_threads_and_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server tokenises in a thread; other requests are unaffected."""
    monkeypatch.setattr(bounded, "WITHIN_S", 0.3)
    good, bad = tiny_tokenizer(templates.CHATML), tiny_tokenizer(ENDLESS)
    expected = prompt_token_ids(good, HELLO)
    with ThreadPoolExecutor(3) as pool:
        endless = pool.submit(prompt_token_ids, bad, HELLO)
        others = [pool.submit(prompt_token_ids, good, HELLO) for _ in range(200)]
        assert all(each.result() == expected for each in others)
        with pytest.raises(UserError, match="does not end"):
            endless.result()
    child = multiprocessing.get_context("fork").Process(target=_raises, args=(bad,))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def _raises(tokenizer: object) -> None:
    with pytest.raises(EndlessTemplate):
        prompt_token_ids(tokenizer, HELLO)
