"""The server of `draftsmith serve`: OpenAI's API, one request at a time, decoded with the drafter's draft trees.

`worker` generates the answers, `api` is OpenAI's API for them, `server` listens on the port, `requests` checks the
clients' requests, `protection` controls access, and `learning` trains the drafter on the served answers. May import all
folders but `cli`.
"""
