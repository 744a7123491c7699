"""A chat template that does not end or fills the memory is one sentence; others are unaffected."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import tiny_tokenizers as templates
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens import bounded, chat_tokens
from draftsmith.data.tokens.bounded import EndlessTemplate
from draftsmith.data.tokens.chat_tokens import prompt_token_ids, tokenize_conversation
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
            EndlessTemplate, match=r"does not end within 0.2 s, .*: look at it, or set target.chat_templ"
        ):
            attempt(tiny_tokenizer(template), HELLO)
    assert time.monotonic() - began < 30
    assert prompt_token_ids(tiny_tokenizer(templates.CHATML), HELLO)  # later code is not interrupted


def test_template_with_a_mask_of_its_own_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second rendering, with the mask, has the same limits."""
    asked: list[int] = []
    monkeypatch.setattr(chat_tokens, "bounded", lambda write: asked.append(1) or bounded.bounded(write))
    talk = Conversation("x", (*HELLO, Turn("assistant", "Hello")))
    assert any(tokenize_conversation(tiny_tokenizer(templates.GENERATION), talk).loss_mask)
    assert asked == [1]


def test_template_that_fills_the_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_GROWTH_BYTES", 64 << 20)
    began = time.monotonic()
    with pytest.raises(EndlessTemplate):
        prompt_token_ids(tiny_tokenizer(HOLDING), HELLO)
    assert time.monotonic() - began < bounded.WITHIN_S / 2


def test_template_that_writes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is refused before it is tokenised: Rust would abort the process."""
    monkeypatch.setattr(bounded, "MOST_CHARACTERS", 1 << 20)
    with pytest.raises(EndlessTemplate, match="1 million characters"):
        prompt_token_ids(tiny_tokenizer("{{ 'x' * 1048577 }}"), HELLO)


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
