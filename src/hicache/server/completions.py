"""POST /v1/completions: one or more prompts, as text or token ids, one answer each, streamed or whole."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from hicache.server.context import ServerContext, client_gone
from hicache.server.job import Job, Submission, unless_gone
from hicache.server.sampling import ask_of, sampling_params
from hicache.server.schema import CompletionRequest
from hicache.server.sse import EventStream
from hicache.server.tenants import Tenant
from hicache.server.wire import Envelope, Json, text_choice, usage_json

KIND = "text_completion"
DEFAULT_ANSWER_TOKENS = 16
"""OpenAI's default for this endpoint."""


async def create_completion(context: ServerContext, request: Request, body: CompletionRequest) -> Response:
    """Answer `body`; an ApiError where it can't be."""
    context.check_model(body.model)
    tenant = context.keyring.tenant(request.scope)
    submissions = await run_in_threadpool(_submissions, context, tenant, body)
    job = Job(context.engine, context.metrics, submissions, tenant)
    envelope = Envelope.new("cmpl", context.engine.model_name, context.fingerprint)
    if body.stream:
        return EventStream(_chunks(job, envelope, body.wants_usage), job)
    answers = await unless_gone(request, job.answers())
    if answers is None:
        return client_gone()
    choices = [text_choice(index, answer.text, answer.finish_reason) for index, answer in enumerate(answers)]
    return JSONResponse({**envelope.wrap(KIND, choices), "usage": usage_json(answer.usage for answer in answers)})


def _submissions(context: ServerContext, tenant: Tenant, body: CompletionRequest) -> list[Submission]:
    many = len(body.prompt) > 1
    submissions = []
    for index, prompt in enumerate(body.prompt):
        param = f"prompt[{index}]" if many else "prompt"
        prepared = context.prompts.completion(prompt, body.answer_tokens, param, DEFAULT_ANSWER_TOKENS)
        params = sampling_params(body, prepared.max_tokens)
        submissions.append(Submission(ask_of(body, prepared.token_ids, params, tenant), param))
    return submissions


async def _chunks(job: Job, envelope: Envelope, wants_usage: bool) -> AsyncIterator[Json]:
    no_usage: Json = {"usage": None} if wants_usage else {}
    usages = []
    async with aclosing(job.events()) as events:
        async for index, chunk in events:
            if chunk.text or chunk.finish_reason is not None:
                yield {**envelope.wrap(KIND, [text_choice(index, chunk.text, chunk.finish_reason)]), **no_usage}
            if chunk.usage is not None:
                usages.append(chunk.usage)
    if wants_usage:
        yield {**envelope.wrap(KIND, []), "usage": usage_json(usages)}
