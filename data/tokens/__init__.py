"""From conversations to token ids, and the mask that says which of them carry loss.

Read `chat_tokens`, then `answer_spans` (where in a rendered template the answers are) and `rows` (cutting to length).
May import `data.sources`.
"""
