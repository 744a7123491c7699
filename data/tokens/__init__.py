"""From conversations to token ids, and the mask that says which of them carry loss.

Read `chat_tokens` (one conversation, whole or shortened to fit), `answer_spans` (where in a rendered template the
answers are), `rows` (many, by several processes) and `end_ids` (what ends an answer). May import `data.sources`.
"""
