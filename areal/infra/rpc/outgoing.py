"""The arguments of one call on their way: a message, and large tensors that are sent ahead on the stream.

Called by ``client`` for every call; used once or, when the call is repeated, several times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal.infra.rpc import frames, heavy, serialization
from areal.infra.rpc.http1 import Body, HttpPeer, Response
from areal.infra.rpc.identity import RunIdentity
from areal.infra.rpc.serialization import Message, Parked
from areal.infra.rpc.stream import StreamConnection, stream_pool

_key_prefix = f"call-{secrets.token_hex(6)}"
_key_numbers = itertools.count()


class Outgoing:
    """Encodes the arguments and sends them.

    Args:
        http: where the message goes.
        identity: whose stream connections are used.
        stream_address: gives where the tensors go, if there are any.
        args, kwargs: the arguments.

    Raises:
        WireError: one cannot travel.
    """

    def __init__(
        self,
        http: HttpPeer,
        identity: RunIdentity,
        stream_address: Callable[[], str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._http = http
        self._identity = identity
        self._stream_address = stream_address
        self._tensors: list[tuple[Parked, memoryview]] = []
        self._message: Message | None = None
        if args or kwargs:
            self._message = serialization.encode([list(args), kwargs], park=self._park)
        self._connection: StreamConnection | None = None

    @contextlib.contextmanager
    def sent(self) -> Iterator[Body]:
        """The body of the request, once the tensors are at the worker; they stay there while the block runs."""
        body: Body = () if self._message is None else self._message.parts()
        if not self._tensors:
            yield body
            return
        with stream_pool.connection(self._stream_address(), self._identity, frames.CALL) as self._connection:
            for parked, view in self._tensors:
                self._connection.request(frames.PUT, [parked.key, parked.dtype, parked.shape], [view])
            yield body

    async def exchange(self, path: str, headers: Mapping[str, str], timeout_s: float) -> Response:
        """Send the request on the running event loop."""
        if not self._tensors:
            body: Body = () if self._message is None else self._message.parts()
            return await self._http.arequest("POST", path, headers, body, timeout_s)
        sending = self.sent()
        body = await asyncio.to_thread(sending.__enter__)
        try:
            response = await self._http.arequest("POST", path, headers, body, timeout_s)
            await asyncio.to_thread(self.settle, response)
        except BaseException as exc:
            sending.__exit__(type(exc), exc, exc.__traceback__)
            raise
        sending.__exit__(None, None, None)
        return response

    def settle(self, response: Response) -> None:
        """Free what a refused request left at the worker."""
        if self._connection is not None and response.status not in (200, 500):
            self._connection.request(frames.FREE, [parked.key for parked, _ in self._tensors])

    def _park(self, tensor: Any) -> Parked:
        dtype, shape, view = heavy.tensor_bytes(tensor)
        parked = Parked(f"{_key_prefix}-{next(_key_numbers)}", dtype, shape)
        self._tensors.append((parked, view))
        return parked
