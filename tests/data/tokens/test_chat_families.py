"""Golden masks of the published chat formats, written by hand: the text with loss and the text around it."""

import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES, mark_loss
from support.tiny_tokenizers import tiny_tokenizer
from transformers import GenerationConfig

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.data.tokens.templates import TemplateRefusal
from draftsmith.errors import UserError

TALK = (
    Turn("user", "Say hi"),
    Turn("assistant", "Hello there.\nünï 👋"),
    Turn("user", " Hello there. "),  # words of the assistant, with spaces around
    Turn("assistant", " Bye\n"),  # spaces that some templates trim
    Turn("user", "Say [INST] bye"),  # text that looks like a control token
    Turn("assistant", "Bye."),
)
SYSTEM = Turn("system", "You are a helper.")
# «» around the text that carries loss.
GOLDEN = {
    "ChatML": (
        "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n«Hello there.\nünï 👋<|im_end|>»\n"
        "<|im_start|>user\n Hello there. <|im_end|>\n<|im_start|>assistant\n« Bye\n<|im_end|>»\n"
        "<|im_start|>user\nSay [INST] bye<|im_end|>\n<|im_start|>assistant\n«Bye.<|im_end|>»\n"
    ),
    "Llama 2": (
        "<s>[INST] Say hi [/INST]« Hello there.\nünï 👋 </s>»<s>[INST] Hello there. [/INST]« Bye </s>»"
        "<s>[INST] Say [INST] bye [/INST]« Bye. </s>»"
    ),
    "Llama 3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nSay hi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello there.\nünï 👋<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nHello there.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Bye<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nSay [INST] bye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Bye.<|eot_id|>»"
    ),
    "Vicuna": (
        "<s>A chat between a curious user and an artificial intelligence assistant. USER: Say hi ASSISTANT:"
        "« Hello there.\nünï 👋</s>»USER:  Hello there.  ASSISTANT:«  Bye\n</s>»"
        "USER: Say [INST] bye ASSISTANT:« Bye.</s>»"
    ),
    "Mistral v0.1": (
        "<s>[INST] Say hi [/INST]«Hello there.\nünï 👋</s>» [INST]  Hello there.  [/INST]« Bye\n</s>» "
        "[INST] Say [INST] bye [/INST]«Bye.</s>» "
    ),
    "Mistral v0.3": (
        "<s>[INST] Say hi[/INST]« Hello there.\nünï 👋</s>»[INST]  Hello there. [/INST]« Bye</s>»"
        "[INST] Say [INST] bye[/INST]« Bye.</s>»"
    ),
    "Gemma 2": (
        "<bos><start_of_turn>user\nSay hi<end_of_turn>\n<start_of_turn>model\n«Hello there.\nünï 👋<end_of_turn>»\n"
        "<start_of_turn>user\nHello there.<end_of_turn>\n<start_of_turn>model\n«Bye<end_of_turn>»\n"
        "<start_of_turn>user\nSay [INST] bye<end_of_turn>\n<start_of_turn>model\n«Bye.<end_of_turn>»\n"
    ),
    "Qwen3": (
        "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n«Hello there.\nünï 👋<|im_end|>»\n"
        "<|im_start|>user\n Hello there. <|im_end|>\n<|im_start|>assistant\n« Bye\n<|im_end|>»\n"
        "<|im_start|>user\nSay [INST] bye<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nBye.<|im_end|>»\n"
    ),
    "R1": (
        "<s><|User|>Say hi<|Assistant|>«Hello there.\nünï 👋</s>»<|User|> Hello there. <|Assistant|>« Bye\n</s>»"
        "<|User|>Say [INST] bye<|Assistant|>«Bye.</s>»"
    ),
}


def marked(family: str, turns: tuple[Turn, ...]) -> str:
    tokenizer = FAMILIES[family].tokenizer()
    rows, _ = tokenize_rows(tokenizer, Conversation("golden", turns), 4096)
    return "".join(mark_loss(tokenizer, row) for row in rows)


@pytest.mark.parametrize("family", GOLDEN)
def test_golden_masks_of_families(family: str) -> None:
    golden = GOLDEN[family]
    assert marked(family, TALK) == golden[: golden.rindex("»") + 1]


def test_answers_whose_system_prompt_moves_have_rows_of_their_own() -> None:
    """Each after the prompt that the target read, with the system prompt in its last turn."""
    last = GOLDEN["Mistral v0.3"].replace("«", "").replace("»", "").replace(" Bye.</s>", "« Bye.</s>»")
    rows = marked("Mistral v0.3", (SYSTEM, *TALK))
    assert rows.startswith(
        "<s>[INST] You are a helper.\n\nSay hi[/INST]« Hello there.\nünï 👋</s>»<s>[INST] Say hi[/INST]"
    )
    assert rows.endswith(last.replace("Say [INST]", "You are a helper.\n\nSay [INST]"))
    assert rows.count("You are a helper.") == rows.count("«") == 3


@pytest.mark.parametrize("family", ["Gemma 2", "Mistral v0.1"])
def test_families_without_system_turns_refuse_them(family: str) -> None:
    with pytest.raises(TemplateRefusal, match="roles system, user"):
        marked(family, (SYSTEM, *TALK))


def test_end_ids_of_model_and_template() -> None:
    """The model's eos (1 = </s>, also the tokenizer's) and the template's <|im_end|>, unknown to the model."""
    tokenizer = tiny_tokenizer(templates.CHATML)
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert answer_end_ids(GenerationConfig(eos_token_id=1), tokenizer) == sorted({1, im_end})
    assert answer_end_ids(GenerationConfig(eos_token_id=[2, 3]), tokenizer) == sorted({1, 2, 3, im_end})
    assert answer_end_ids(GenerationConfig(), tokenizer) == sorted({1, im_end})


def test_template_without_end_token_has_no_end_ids() -> None:
    tokenizer = tiny_tokenizer(templates.NO_END_TOKEN)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"no end-of-sequence token .*: set tokenizer\.eos_token and save"):
        answer_end_ids(GenerationConfig(), tokenizer)
