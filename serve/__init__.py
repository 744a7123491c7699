"""Our own server, `draftsmith serve`: OpenAI's API with draft trees, one request at a time, and a drafter that learns.

Read `worker` (the answers), `api` (OpenAI's API over them), `server` (the port), with the clients' requests in
`requests` and access control in `protection`; `learning` trains the drafter on what is served. May import all folders
but `cli`.
"""
