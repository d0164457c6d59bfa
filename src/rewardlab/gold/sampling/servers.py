"""Replies of a language model behind the chat API of OpenAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewardlab.gold.chat_api import ChatApi, RequestRefusedError
from rewardlab.gold.sampling.asks import Ask
from rewardlab.gold.sampling.config import TEMPLATE_ARGUMENTS, DrawConfig, SamplerConfig

Reply = dict[str, Any]
"""`text`, `stop`, and where they are known `tokens`, `prompt_tokens` and `logprob`; or `error` alone."""


class ServedSampler:
    """One server as a source of replies; a part is one reply."""

    def __init__(self, url: str, draw: DrawConfig, config: SamplerConfig) -> None:
        """Raise ConfigError for an address or a token that is unusable."""
        from rewardlab.client.config import token_in

        self.name = url
        self.places = config.concurrency
        self._parameters = {**draw.decides(), **({"logprobs": True} if config.logprobs else {})}
        if TEMPLATE_ARGUMENTS in self._parameters:
            self._parameters["chat_template_kwargs"] = self._parameters.pop(TEMPLATE_ARGUMENTS)
        self._api = ChatApi(
            url,
            model=config.served_model_name,
            token=token_in(config.token_env, flag="--token-env"),
            concurrency=config.concurrency,
            timeout_s=config.timeout_s,
            attempts=config.attempts,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What decides a reply; known once the source is open."""
        return self._api.identity

    async def open(self) -> None:
        """Find the model. Raises EndpointError, ConfigError."""
        await self._api.open()

    async def ask(self, items: Sequence[Ask]) -> Sequence[Reply]:
        """Return the replies. Raises PassingError, EndpointError as `ChatApi.complete`."""
        return [await self._one(item) for item in items]

    async def _one(self, item: Ask) -> Reply:
        try:
            found = await self._api.complete(item.prompt, seed=item.seed, **self._parameters)
        except RequestRefusedError as error:
            return {"error": str(error)}
        facts = {"tokens": found.tokens, "prompt_tokens": found.prompt_tokens, "logprob": found.logprob}
        known = {name: value for name, value in facts.items() if value is not None}
        return {"text": found.text, "stop": found.stop, **known}

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()
