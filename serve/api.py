"""FastAPI application that offers OpenAI's API for the answers of a `Worker`.

Responses have an additional field `draftsmith`. A streamed chunk gives the numbers of its tokens and accepted draft
tokens, and the accepted text; while the request waits, a chunk gives its place in the queue (`waiting`). A whole answer
gives its rounds and tokens per round. Requests with unsupported fields get HTTP 400; if the queue is full, HTTP 429.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import queue
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from draftsmith.errors import UserError
from draftsmith.models.sampling import Sampling
from draftsmith.serve.protection import Guard, error, page_response
from draftsmith.serve.requests import ChatRequest, prompt_ids
from draftsmith.serve.worker import CompletedAnswer, Job, RequestCancelled, Waiting, Worker

PAGE = Path(__file__).with_name("page.html")

logger = logging.getLogger(__name__)


def application(worker: Worker, api_key: str | None = None, names: Sequence[str] = ()) -> FastAPI:
    """Build the FastAPI application that serves OpenAI's API and the chat page.

    Args:
        worker: Worker that generates the answers. Its `work` must not run in the server's thread, but best in the one
        that loaded the models.
        api_key: Bearer token that clients must send; None: no token is needed.
        names: Further host names by which clients may reach the server, see `Guard`.
    """
    app = FastAPI(title="draftsmith", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    name = worker.recipe.target.display_name
    # In one separate thread, so that tokenising a long text does not block the event loop, which sends the pieces.
    tokenising = ThreadPoolExecutor(1, "tokenising")

    app.add_middleware(Guard, names=names)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        detail = first["msg"].removeprefix("Value error, ")
        return error(400, f"{where}: {'not supported here' if first['type'] == 'extra_forbidden' else detail}")

    @app.exception_handler(UserError)
    async def unusable(_: Request, problem: UserError) -> Response:
        return error(400, str(problem))

    @app.exception_handler(AnyHTTPException)  # starlette's too, for unknown paths and methods
    async def refused(_: Request, problem: AnyHTTPException) -> Response:
        return error(problem.status_code, str(problem.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, problem: Exception) -> Response:
        logger.error("a request failed", exc_info=problem)
        response = error(500, "the request failed")
        response.headers["Connection"] = "close"  # the server closes it after an exception; a client must not reuse it
        return response

    def check_api_key(request: Request) -> None:
        """Raise HTTP 401 unless the request has the API key."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise HTTPException(401, "the API key is wrong or missing: send it as `Authorization: Bearer KEY`")

    def submit(body: ChatRequest, ids: list[int]) -> tuple[Job, asyncio.Queue[Any]]:
        """Queue a request; returns its job and the queue of its results."""
        room = worker.length - len(ids)
        if room < 1:
            raise HTTPException(
                400, f"the prompt has {len(ids)} tokens: shorten it, prompt and answer have room for {worker.length}"
            )
        loop, out = asyncio.get_running_loop(), asyncio.Queue[Any]()
        job = Job(
            ids,
            min(room, body.max_completion_tokens or body.max_tokens or room),
            Sampling(body.temperature, 0, body.top_p),
            uuid.uuid4().int % 2**63 if body.seed is None else body.seed % 2**63,
            body.stop,
            lambda piece: loop.call_soon_threadsafe(out.put_nowait, piece),
            streamed=body.stream,
        )
        try:
            worker.submit(job)
        except queue.Full:
            raise HTTPException(429, f"the queue is full ({worker.jobs.maxsize} requests): try again later") from None
        except RequestCancelled:
            raise HTTPException(503, "the server is stopping") from None
        return job, out

    async def streamed(
        job: Job, out: asyncio.Queue[Any], made: dict[str, Any], body: ChatRequest
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of an answer."""
        chunk = {**made, "object": "chat.completion.chunk"}

        def event(delta: dict[str, str], reason: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "finish_reason": reason, "logprobs": None, "delta": delta}
            return f"data: {json.dumps({**chunk, 'choices': [choice], **more})}\n\n"

        try:
            yield event({"role": "assistant", "content": ""})
            while not isinstance(end := await out.get(), CompletedAnswer):
                if isinstance(end, BaseException):
                    yield f"data: {json.dumps({'error': {'message': 'the answer failed', 'type': 'server_error'}})}\n\n"
                    return
                if isinstance(end, Waiting):
                    yield event({}, draftsmith={"waiting": end.place})
                    continue
                own = {"tokens": end.tokens, "accepted_tokens": end.accepted, "drafted_text": end.drafted}
                if end.text or end.tokens:
                    yield event({"content": end.text}, draftsmith=own)
            yield event({}, end.reason)
            if body.stream_options.get("include_usage"):
                yield f"data: {json.dumps({**chunk, 'choices': [], 'usage': usage(end)})}\n\n"
            yield "data: [DONE]\n\n"
        finally:  # also when the client has disconnected
            job.cancelled.set()

    @app.post("/v1/chat/completions", dependencies=[Depends(check_api_key)])
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        turns = body.turns
        if turns[-1].role != "user":
            raise HTTPException(400, f"messages: the last message has role {turns[-1].role}, but must have role user")
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(tokenising, prompt_ids, worker.tokenizer, turns, worker.length)
        job, out = submit(body, ids)
        made = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if body.stream:
            return StreamingResponse(streamed(job, out, made, body), media_type="text/event-stream")
        try:
            end = await next_result(out, request)
        finally:
            job.cancelled.set()
        message = {"role": "assistant", "content": end.text}
        return JSONResponse(
            made
            | {
                "object": "chat.completion",
                "choices": [{"index": 0, "finish_reason": end.reason, "logprobs": None, "message": message}],
                "usage": usage(end),
                "draftsmith": {
                    "rounds": end.record.rounds,
                    "accepted_tokens": end.record.accepted_drafts,
                    "tokens_per_round": end.record.accept_lengths,
                },
            }
        )

    @app.get("/v1/models", dependencies=[Depends(check_api_key)])
    async def models() -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": 0, "owned_by": "draftsmith", "max_model_len": worker.length}
        return {"object": "list", "data": [card]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/")
    async def page() -> Response:
        return page_response(PAGE.read_text(encoding="utf-8"))

    return app


def usage(finished: CompletedAnswer) -> dict[str, int]:
    """Return the `usage` field of OpenAI's API: token counts of prompt and answer, the end token included."""
    prompt, answer = len(finished.prompt_ids), len(finished.record.ids)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


async def next_result(out: asyncio.Queue[Any], request: Request) -> Any:
    """Wait for the next result of a request, and check every 0.5 s whether its client is still connected.

    Raises:
        HTTPException: The client has disconnected, or the answer failed.
    """
    while True:
        try:
            piece = await asyncio.wait_for(out.get(), timeout=0.5)
        except TimeoutError:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has disconnected") from None
            continue
        if isinstance(piece, BaseException):
            raise HTTPException(500, "the answer failed: the server's log has the reason")
        return piece
