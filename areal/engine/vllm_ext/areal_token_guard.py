"""Has a vLLM server refuse everybody who does not know its token; health and metrics alone are open.

vLLM's own check of ``VLLM_API_KEY`` covers routes that generate (``/v1``, ``/inference``), not those that pause,
replace weights or call workers. In: the token in that variable, and ASGI calls. Named by ``--middleware`` where
``areal.engine.inference.launch`` starts vLLM. It runs in vLLM's environment: standard library only.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[None]]

OPEN = ("/health", "/metrics", "/metrics/")


class TokenGuard:
    """ASGI middleware.

    Args:
        app: gets the calls that carry the token.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        token = os.environ["VLLM_API_KEY"]  # noqa: TID251 - areal is not installed here
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        """Pass a call on, or answer 401."""
        kind = scope["type"]
        if kind not in ("http", "websocket") or scope["path"] in OPEN or self._knows_token(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = "Authorization must be 'Bearer' and the token of this server"
            await send(
                {"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": json.dumps({"error": {"message": message}}).encode()})

    def _knows_token(self, scope: dict[str, Any]) -> bool:
        sent = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(sent, self._expected)
