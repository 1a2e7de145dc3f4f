"""POST /v1/chat/completions: the model's chat template, one answer, streamed or whole."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from hicache.server.context import ServerContext, client_gone
from hicache.server.job import Job, Submission, unless_gone
from hicache.server.sampling import ask_of, sampling_params
from hicache.server.schema import ChatRequest
from hicache.server.sse import EventStream
from hicache.server.wire import Envelope, Json, chat_choice, chat_delta, usage_json

CHUNK = "chat.completion.chunk"


async def create_chat_completion(context: ServerContext, request: Request, body: ChatRequest) -> Response:
    """Answer `body`; an ApiError where it can't be."""
    context.check_model(body.model)
    tenant = context.keyring.tenant(request.scope)
    prompt = await run_in_threadpool(context.prompts.chat, body.messages, body.answer_tokens)
    params = sampling_params(body, prompt.max_tokens)
    ask = ask_of(body, prompt.token_ids, params, tenant)
    job = Job(context.engine, context.metrics, [Submission(ask, "messages")], tenant)
    envelope = Envelope.new("chatcmpl", context.engine.model_name, context.fingerprint)
    if body.stream:
        return EventStream(_chunks(job, envelope, body.wants_usage), job)
    answers = await unless_gone(request, job.answers())
    if answers is None:
        return client_gone()
    answer = answers[0]
    content = envelope.wrap("chat.completion", [chat_choice(answer.text, answer.finish_reason)])
    return JSONResponse({**content, "usage": usage_json([answer.usage])})


async def _chunks(job: Job, envelope: Envelope, wants_usage: bool) -> AsyncIterator[Json]:
    no_usage: Json = {"usage": None} if wants_usage else {}
    usages = []
    first = True
    async with aclosing(job.events()) as events:
        async for _, chunk in events:
            if first:
                role = {"role": "assistant", "content": ""}
                yield {**envelope.wrap(CHUNK, [chat_delta(role, None)]), **no_usage}
                first = False
            if chunk.text:
                yield {**envelope.wrap(CHUNK, [chat_delta({"content": chunk.text}, None)]), **no_usage}
            if chunk.finish_reason is not None:
                yield {**envelope.wrap(CHUNK, [chat_delta({}, chunk.finish_reason)]), **no_usage}
            if chunk.usage is not None:
                usages.append(chunk.usage)
    if wants_usage:
        yield {**envelope.wrap(CHUNK, []), "usage": usage_json(usages)}
