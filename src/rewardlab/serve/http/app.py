"""The app: routes around an engine. It depends on no model and no socket, so tests call it with a made-up engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from rewardlab.client.protocol import DIGEST_HEADER, SCORE_PATH, SPEC_PATH, ScoreRequest, ScoreResponse, SpecResponse
from rewardlab.serve.engine.api import DrainingError, Engine
from rewardlab.serve.http import compat, compat_forms
from rewardlab.serve.http.admin import Swap, SwapRequest, SwapResponse, Swaps
from rewardlab.serve.http.answers import answer, plain_error
from rewardlab.serve.http.config import HttpConfig
from rewardlab.serve.http.metrics import CONTENT_TYPE, Families, Metrics, exposition
from rewardlab.serve.http.middleware import Door
from rewardlab.serve.http.openapi import ADMINISTRATION, EVERYWHERE, SCORING, describe, errors, takes
from rewardlab.serve.http.scoring import Answered, Scoring
from rewardlab.serve.http.telemetry import Spans

BODIES: Final[Sequence[type[BaseModel]]] = (
    ScoreRequest,
    compat_forms.PoolingRequest,
    compat_forms.GetRewardRequest,
    compat_forms.SlimeRequest,
    SwapRequest,
)


# Every answer is made by `answer`, as bytes of an explicit class: FastAPI neither validates nor converts what a route
# returns. Bodies are read by `Scoring`, which counts them while they arrive; a parameter of a body class would let
# FastAPI read them whole, without limits. Hence `openapi.py` describes bodies and answers by hand.


class Status(BaseModel):
    """The answer of `/health` and `/ready`."""

    status: str


@dataclass(frozen=True, kw_only=True)
class Served:
    """An app, with the parts of it that a server has to reach."""

    app: FastAPI
    scoring: Scoring
    metrics: Metrics
    engine: Engine
    swaps: Swaps | None = None
    """None without administrators."""

    def is_ready(self) -> bool:
        """Return whether requests are taken: the engine is alive and has models, and the server is not ending."""
        return not self.scoring.draining and self.engine.healthy() and len(self.engine.served()) > 0


def make_app(
    engine: Engine,
    config: HttpConfig,
    *,
    swap: Swap | None = None,
    gather: Callable[[Families], Families] | None = None,
    spans: Spans | None = None,
) -> Served:
    """Return the app that answers for an engine.

    With several workers, `swap` replaces a model in all of them and `gather` adds up the counts of all.
    """
    # A slash too many is a 404: a redirect would name plain http even where the proxy before this server has TLS.
    app = FastAPI(title="rewardlab", docs_url=None, redoc_url=None, redirect_slashes=False)
    scoring = Scoring(engine, config.limits)
    # `served` is bound a few lines below; the lambda is called only when somebody asks for metrics.
    metrics = Metrics(engine, lambda: served.is_ready())
    may_swap = config.admin_token is not None
    swaps = Swaps(swap or engine.swap, config.allow_swap_from, config.limits) if may_swap else None
    served = Served(app=app, scoring=scoring, metrics=metrics, engine=engine, swaps=swaps)
    routes = Routes(served, config, spans or Spans(None))
    routes.add_ours(gather or (lambda families: families))
    routes.add_theirs()
    if swaps is not None:
        routes.add_admin(swaps)
    app.add_exception_handler(HTTPException, _plain)
    # Metrics name only these: a client could otherwise add a label for every path that it makes up.
    known = frozenset(getattr(route, "path", "") for route in app.routes)
    app.add_middleware(Door, config=config, metrics=metrics, routes=known)
    describe(app, BODIES, version=version("rewardlab"), guarded=config.token is not None)
    return served


async def _plain(_request: Request, error: Any) -> Response:
    """Return an error that FastAPI raises itself, such as 404, in the form of all other errors."""
    return plain_error(error.status_code, error.headers)


class Routes:
    """The routes of an app, added by kind."""

    def __init__(self, served: Served, config: HttpConfig, spans: Spans) -> None:
        self._served = served
        self._config = config
        self._spans = spans

    def add_ours(self, gather: Callable[[Families], Families]) -> None:
        """Add this project's own routes."""
        app, served = self._served.app, self._served

        # Load balancers ask by HEAD.
        @app.head("/health", include_in_schema=False)
        @app.get("/health", responses={200: {"model": Status}, **errors((405, 500, 503))})
        async def health() -> Response:
            """Say whether the thread that computes is alive; a supervisor restarts the server if not."""
            return answer(
                Status(status="alive" if (alive := served.engine.healthy()) else "dead"), status=200 if alive else 503
            )

        @app.head("/ready", include_in_schema=False)
        @app.get("/ready", responses={200: {"model": Status}, **errors((405, 500, 503))})
        async def ready() -> Response:
            """Say whether requests are taken: models are verified, and the server is not shutting down."""
            if not served.is_ready():
                raise DrainingError("Not ready: the server is about to end, or its engine is not alive.")
            return answer(Status(status="ready"))

        @app.get("/metrics", response_class=Response, responses={200: _TEXT, **errors(EVERYWHERE)})
        async def metrics() -> Response:
            """Return counts for Prometheus, added up over all workers."""
            # In a thread, since `gather` waits for the answers of other processes.
            families = await asyncio.to_thread(lambda: gather(served.metrics.families()))
            return Response(exposition(families), headers={"content-type": CONTENT_TYPE})

        @app.get(SPEC_PATH, responses={200: {"model": SpecResponse}, **errors((*EVERYWHERE, 503))})
        async def spec() -> Response:
            """Return the models with their digests, templates and canaries, the default model first."""
            # In a thread, so that the event loop goes on whatever an engine does in `served`.
            models = list(await asyncio.to_thread(served.engine.served))
            headers = {DIGEST_HEADER: models[0].digest} if models else None
            return answer(SpecResponse(version=version("rewardlab"), models=models), headers=headers)

        @app.get("/v1/models", responses={200: {"model": compat_forms.ModelsResponse}, **errors((*EVERYWHERE, 503))})
        async def models() -> Response:
            """Return the models as OpenAI's API lists them."""
            listed = [
                compat_forms.ListedModel(id=one.name, root=one.digest, max_model_len=one.max_length)
                for one in await asyncio.to_thread(served.engine.served)
            ]
            return answer(compat_forms.ModelsResponse(data=listed))

        self._post(
            SCORE_PATH,
            ScoreRequest,
            lambda body: body,
            _ours,
            ScoreResponse,
            "Score replies.",
            to_place=lambda _body, place: place,
        )

    def add_theirs(self) -> None:
        """Add routes in the shapes of vLLM, OpenRLHF and slime."""
        # Where a body has an id for the request (vLLM's `request_id`), the answer repeats it as vLLM's does; otherwise
        # it has the id of this server.
        engine, accept, limits = self._served.engine, self._config.accept_rendered, self._config.limits
        pooling = compat.pooling_reader(engine, limits)
        self._post(
            "/classify",
            compat_forms.PoolingRequest,
            pooling,
            lambda done, name: answer(compat.classified(done.scored, name=done.asked.body.request_id or name)),
            compat_forms.ClassifyResponse,
            "Raw scores in the shape of vLLM's /classify.",
        )
        self._post(
            "/pooling",
            compat_forms.PoolingRequest,
            pooling,
            lambda done, name: answer(compat.pooled(done.scored, name=done.asked.body.request_id or name)),
            compat_forms.PoolingResponse,
            "Raw scores in the shape of vLLM's /pooling.",
        )
        self._post(
            "/get_reward",
            compat_forms.GetRewardRequest,
            compat.get_reward_reader(engine, limits, accept_rendered=accept),
            lambda done, _name: answer(compat.rewarded(done.scored)),
            compat_forms.GetRewardResponse,
            "Raw scores as OpenRLHF asks for them.",
        )
        self._post(
            "/slime",
            compat_forms.SlimeRequest,
            compat.slime_reader(engine, limits, accept_rendered=accept),
            lambda done, _name: Response(repr(compat.flat_scores(done.scored)[0]), media_type="application/json"),
            float,
            "The raw score of one sample as slime asks for it: a bare number.",
        )

    def add_admin(self, swaps: Swaps) -> None:
        """Add the routes that change what is served."""

        @self._served.app.post(
            "/admin/swap",
            responses={200: {"model": SwapResponse}, **errors(ADMINISTRATION)},
            openapi_extra=takes(SwapRequest),
        )
        async def swap(request: Request) -> Response:
            """Replace a model by another folder, without dropping or mixing requests."""
            done = await swaps.answer(request.receive, request.headers)
            request.scope["rewardlab"].update(model=done.model, digest=done.digest[:12])
            return answer(done, headers={DIGEST_HEADER: done.digest})

    def _post(
        self,
        path: str,
        kind: type[Any],
        to_request: Callable[[Any], ScoreRequest],
        to_answer: Callable[[Answered[Any], str], Response],
        answers: Any,
        text: str,
        to_place: Callable[[Any, str], str] = compat.place_in,
    ) -> None:
        """Add a route that scores.

        `kind` is the class of its body, `to_request` turns a body into a request for the engine, `to_answer` turns
        (what was asked and answered, the id of the request) into the response, `answers` is the class of the response
        for /openapi.json, `text` describes the route there, and `to_place` turns a place in the request into the
        place in the body that an error names.
        """
        served, spans = self._served, self._spans

        async def score(request: Request) -> Response:
            # `Door` made this dict and writes it into the log line; texts of conversations stay out of it.
            noted = request.scope["rewardlab"]
            with spans.request(path, request.headers) as span:
                done = await served.scoring.score(request.receive, request.headers, kind, to_request, to_place)
                scored = done.scored
                raw = done.asked.request.output == "raw"
                noted.update(
                    model=scored.model,
                    digest=scored.digest[:12],
                    conversations=sum(len(group.scores) for group in scored.groups),
                    computed=scored.usage.computed_tokens,
                    cached=scored.usage.cached_tokens,
                )
                span.note(noted)
            served.metrics.scored(scored, raw=raw)
            response = to_answer(done, noted["id"])
            response.headers[DIGEST_HEADER] = scored.digest
            return response

        route: Callable[[Request], Awaitable[Response]] = score
        self._served.app.post(
            path,
            name=path.strip("/").replace("/", "_"),
            description=text,
            responses={200: {"model": answers, "description": text}, **errors(SCORING)},
            openapi_extra=takes(kind),
        )(route)


def _ours(done: Answered[ScoreRequest], _name: str) -> Response:
    scored = done.scored
    return answer(
        ScoreResponse(
            model=scored.model,
            digest=scored.digest,
            output=done.asked.request.output,
            groups=list(scored.groups),
            usage=scored.usage,
        )
    )


_TEXT: Final[dict[str, Any]] = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Counts."}
