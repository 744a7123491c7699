"""From conversations to token ids, and the mask that says which of them carry loss.

Read `chat_tokens`: one conversation, whole or shortened to fit; what ends an answer; where in a rendered template the
answers are. May import `data.sources`.
"""
