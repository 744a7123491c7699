"""From conversations to token ids, and the mask that says which of them carry loss.

Read `chat_tokens`, then `answer_spans` (where in a rendered template the answers are), `rows` (cutting to length)
and `end_ids` (what ends an answer). May import `data.sources`.
"""
