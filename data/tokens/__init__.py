"""From conversations to token ids, and the mask that says which of them carry loss.

Read `rows` (a conversation's prompts and answers become rows), with `templates` (rendering, and what a template does),
`chat_tokens` (ids of prompts) and `loss_mask`. `bounded` limits what a template may take, `tool_calls` writes calls as
it does. May import `data.sources`.
"""
