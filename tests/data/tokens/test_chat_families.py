"""Golden masks of the published chat formats, written by hand: the text with loss and the text around it."""

import pytest
from support import tiny_tokenizers as templates
from support.chat_families import FAMILIES, mark_loss
from support.tiny_tokenizers import tiny_tokenizer
from transformers import GenerationConfig

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids, tokenize_conversation
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
# Earlier answers stand after a prompt without its empty block, and are learned in rows of their own.
GOLDEN["Qwen3, no thoughts"] = (
    GOLDEN["Qwen3"].replace("«", "").replace("»", "").replace("Bye.<|im_end|>", "«Bye.<|im_end|>»")
)
# The effect of a system turn: (place in the text without it, the text with it).
WITH_SYSTEM = {
    "ChatML": ("<|im_start|>user\nSay hi", "<|im_start|>system\nYou are a helper.<|im_end|>\n<|im_start|>user\nSay hi"),
    "Llama 2": ("[INST] Say hi", "[INST] <<SYS>>\nYou are a helper.\n<</SYS>>\n\nSay hi"),
    "Llama 3": (
        "<|begin_of_text|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helper.<|eot_id|>",
    ),
    "Vicuna": ("A chat between a curious user and an artificial intelligence assistant.", "You are a helper."),
    "Qwen3": ("<|im_start|>user\nSay hi", "<|im_start|>system\nYou are a helper.<|im_end|>\n<|im_start|>user\nSay hi"),
}


def marked(family: str, turns: tuple[Turn, ...]) -> str:
    tokenizer = FAMILIES[family].tokenizer()
    return mark_loss(tokenizer, tokenize_conversation(tokenizer, Conversation("golden", turns)))


@pytest.mark.parametrize("family", GOLDEN)
def test_golden_masks_of_families(family: str) -> None:
    assert marked(family, TALK) == GOLDEN[family]


@pytest.mark.parametrize("family", WITH_SYSTEM)
def test_system_turn_changes_nothing_else(family: str) -> None:
    without, with_it = WITH_SYSTEM[family]
    assert GOLDEN[family].count(without) == 1
    assert marked(family, (SYSTEM, *TALK)) == GOLDEN[family].replace(without, with_it)


def test_answers_whose_system_prompt_moves_carry_no_loss() -> None:
    """The target read it before each of them."""
    moved = GOLDEN["Mistral v0.3"].replace("«", "").replace("»", "").replace(" Bye.</s>", "« Bye.</s>»")
    assert marked("Mistral v0.3", (SYSTEM, *TALK)) == moved.replace("Say [INST]", "You are a helper.\n\nSay [INST]")


@pytest.mark.parametrize("family", ["Gemma 2", "Mistral v0.1"])
def test_families_without_system_turns_refuse_them(family: str) -> None:
    with pytest.raises(TemplateRefusal, match="roles system, user"):
        marked(family, (SYSTEM, *TALK))


@pytest.mark.parametrize("family", FAMILIES)
def test_last_answer_follows_the_generation_prompt(family: str) -> None:
    """Train = decode: the last answer follows exactly the prompt ids given to the target."""
    tokenizer = FAMILIES[family].tokenizer()
    tokenized = tokenize_conversation(tokenizer, Conversation("golden", TALK))
    prompt = prompt_token_ids(tokenizer, TALK[:-1])
    if family == "R1":  # its generation prompt opens thoughts that the template does not write
        prompt = prompt[: -len(tokenizer.encode("<think>\n", add_special_tokens=False))]
    assert tokenized.input_ids[: len(prompt)] == prompt
    assert tokenized.loss_mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


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
