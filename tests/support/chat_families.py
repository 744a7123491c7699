"""Chat formats of common model families, rendered as published, and their tokens.

The templates are written for these tests; their output is the published form, character by character.
"""

from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from support.tiny_tokenizers import CHATML, LLAMA3, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

LLAMA2 = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ((system if loop.first else '') + m.content).strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
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
MISTRAL_V03 = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{% set system = messages[0].content + '\n\n' %}{% endif %}{{ bos_token }}{% for m in turns %}"
    + ALTERNATE
    + "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + ALTERNATE + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}"
    "{{ '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Thoughts stay after the last user turn and are removed before it; the last answer always has a think block.
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
# As published: it also reads the separate field of thoughts.
QWEN3_FIELD = QWEN3.replace(
    "{% if '</think>' in said %}",
    "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}{% elif '</think>' in said %}",
)
# Qwen3 without thoughts: the empty block is part of the prompt.
QWEN3_SILENT = "{% set enable_thinking = false %}" + QWEN3
# DeepSeek R1's distillates: the prompt opens the thoughts, and the template never writes any.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == "
    "'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# With tools. Qwen writes each call in its own block, and results in a user's turn.
QWEN_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'You "
    "help.') + "
    "'\n\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}CALL{% endfor %}{% if not m.content and not m.tool_calls %}{{ '\n' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN25_TOOLS = QWEN_TOOLS.replace(
    "CALL",
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson '
    "+ '}\n</tool_call>' }}",
)
QWEN3_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}"
    "{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    + QWEN3.replace(
        "{{ '<|im_end|>\n' }}{% else %}",
        "{% for call in m.tool_calls %}{% if said or not loop.first %}{{ '\n' }}{% endif %}"
        '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% elif m.role == 'tool' %}"
        "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% else %}",
    )
)
QWEN3_CODER = QWEN_TOOLS.replace(
    "CALL",
    "{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for name, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + name + '>\n' + value | string + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}",
)
# One call a turn; tools stand in the first user turn.
LLAMA31 = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + m.tool_calls[0].function.name + '
    "'\", \"parameters\": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if tools and loop.first %}"
    "{{ 'Given the following functions, answer with a call in JSON.\n\n' }}{% for tool in tools %}"
    "{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# A call begins with a special token, its id has nine letters and digits, and tools move to the last user turn.
MISTRAL_TOOLS = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, conversation roles must alternate user and assistant!') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | list | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' + (']' + eos_token if loop.last else ', ') }}"
    "{% endfor %}{% elif m.role == 'tool' %}"
    '{{ \'[TOOL_RESULTS] {"content": \' + m.content | string + \', "call_id": "\' + m.tool_call_id + '
    "'\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and the token that ends an answer."""

    template: str
    end: str = "</s>"
    bos: str = "<s>"
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = field(default=())  # added tokens that are not special

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = tiny_tokenizer(self.template, special=self.special)
        tokenizer.add_tokens(list(self.added))
        tokenizer.bos_token, tokenizer.eos_token = self.bos, self.end
        return tokenizer


THOUGHTS = ("<think>", "</think>")
TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>")
FAMILIES = {
    "ChatML": Family(CHATML, "<|im_end|>"),
    "Llama 2": Family(LLAMA2),
    "Llama 3": Family(LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
    "Vicuna": Family(VICUNA),
    "Mistral v0.1": Family(MISTRAL_V01),
    "Mistral v0.3": Family(MISTRAL_V03, special=("[INST]", "[/INST]")),
    "Gemma 2": Family(GEMMA2, "<end_of_turn>", "<bos>", TURNS),
    "Qwen3": Family(QWEN3, "<|im_end|>", added=THOUGHTS),
    "Qwen3, no thoughts": Family(QWEN3_SILENT, "<|im_end|>", added=THOUGHTS),
    "R1": Family(R1, special=("<|User|>", "<|Assistant|>"), added=THOUGHTS),
}
CALL_TOKENS = ("<tool_call>", "</tool_call>")
MISTRAL_TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
TOOL_FAMILIES = {
    "Qwen2.5": Family(QWEN25_TOOLS, "<|im_end|>", added=CALL_TOKENS),
    "Qwen3": Family(QWEN3_TOOLS, "<|im_end|>", added=(*THOUGHTS, *CALL_TOKENS)),
    "Qwen3-Coder": Family(QWEN3_CODER, "<|im_end|>", added=CALL_TOKENS),
    "Llama 3.1": Family(LLAMA31, "<|eot_id|>", "<|begin_of_text|>"),
    "Mistral v0.3": Family(MISTRAL_TOOLS, special=(*MISTRAL_TOKENS, "[/TOOL_RESULTS]")),
}

FIELD_OF_THOUGHTS = Family(QWEN3_FIELD, "<|im_end|>", added=THOUGHTS)


def mark_loss(tokenizer: Any, row: Any) -> str:
    """Return the row's text with «» around tokens that carry loss."""
    runs = [
        (loss, list(run)) for loss, run in groupby(zip(row.loss_mask, row.input_ids, strict=True), key=itemgetter(0))
    ]
    texts = [(loss, tokenizer.decode([token for _, token in run])) for loss, run in runs]
    return "".join(f"«{text}»" if loss else text for loss, text in texts)
