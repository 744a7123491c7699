"""The chat formats of the families that people train drafters for, as their publishers render them, and their tokens.

The templates are written for these tests; what they render is the published form, character by character.
"""

from dataclasses import dataclass, field

from support.tiny_tokenizers import CHATML, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

LLAMA2 = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ((system if loop.first else '') + m.content).strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# FastChat's vicuna_v1.1.
VICUNA = (
    "{{ bos_token }}{% set turns = messages %}{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{{ messages[0].content + ' ' }}{% else %}{{ 'A chat between a curious user and an artificial intelligence "
    "assistant. ' }}{% endif %}{% for m in turns %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}"
    "{% else %}{{ ' ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
# v0.1 writes a space after each end token, v0.2 none; neither takes a system turn.
MISTRAL_V01 = (
    "{{ bos_token }}{% for m in messages %}" + ALTERNATE + "{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token + ' ' }}{% endif %}{% endfor %}"
)
# The system prompt moves to the last user turn.
MISTRAL_SYSTEM = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{% set system = messages[0].content + '\n\n' %}{% endif %}{{ bos_token }}{% for m in turns %}" + ALTERNATE
)
MISTRAL_V03 = (
    MISTRAL_SYSTEM + "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
GEMMA_TURNS = (
    ALTERNATE + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if loop.first and system %}{{ system }}{% endif %}{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + GEMMA_TURNS
)
# Thoughts stay after the last user turn and leave the history; the last answer always has a block of them.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thoughts, said = '', m.content %}{% if '</think>' in said %}"
    "{% set thoughts = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{ '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}{% else %}{{ said }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
# As one sets it who serves Qwen3 without thoughts: the block is of the prompt.
QWEN3_SILENT = "{% set enable_thinking = false %}" + QWEN3
# DeepSeek R1's distillates: the prompt opens the thoughts, and no thoughts are ever written.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == "
    "'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, the tokens that it needs, and the token that ends an answer."""

    template: str
    end: str = "</s>"
    bos: str = "<s>"
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = field(default=())  # tokens of their own that are not special

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = tiny_tokenizer(self.template, special=self.special)
        tokenizer.add_tokens(list(self.added))
        tokenizer.bos_token, tokenizer.eos_token = self.bos, self.end
        return tokenizer


THOUGHTS = ("<think>", "</think>")
INSTRUCTION = ("[INST]", "[/INST]")
TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>")
FAMILIES = {
    "ChatML": Family(CHATML, "<|im_end|>"),
    "Llama 2": Family(LLAMA2),
    "Llama 3": Family(LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
    "Vicuna": Family(VICUNA),
    "Mistral v0.1": Family(MISTRAL_V01),
    "Mistral v0.3": Family(MISTRAL_V03, special=INSTRUCTION),
    "Gemma 2": Family(GEMMA2, "<end_of_turn>", "<bos>", TURNS),
    "Qwen3": Family(QWEN3, "<|im_end|>", added=THOUGHTS),
    "Qwen3, no thoughts": Family(QWEN3_SILENT, "<|im_end|>", added=THOUGHTS),
    "R1": Family(R1, special=("<|User|>", "<|Assistant|>"), added=THOUGHTS),
}
