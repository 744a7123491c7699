"""From conversations to token ids, and the mask that says which of them carry loss.

Read `chat_tokens` (one conversation, whole or shortened to fit), with `templates` (rendering), `spans` (where the
answers are in it) and `loss_mask`. `bounded` limits what a template may take, `tool_calls` writes calls as it does. May
import `data.sources`.
"""
