"""``python -m areal.engine.native.server``: the native engine behind HTTP, with SGLang's ``/generate`` contract.

::

    event loop (HTTP) --submit--> engine's worker thread          running --pause abort|keep--> paused
        `--weight calls, one at a time, in a thread                  ^---- continue ------------'

    GET  /health  /model_info                     answer at once, also while paused
    POST /generate  /abort_request  /flush_cache
    POST /pause_generation {"mode": "abort" | "keep"}  /continue_generation
    POST /update_weights_from_{disk,shm,distributed}  /commit_weights  /discard_weights  /update_weight_version
    POST /init_weights_update_group  /destroy_weights_update_group

An update stages into the engine's spare buffer while generation goes on; unless ``"commit": false`` asks to wait for
``/commit_weights``, it is then put in service between two decode steps. A failed one changes nothing. Every error is
``{"error": {"message"}}`` with a 4xx status if the request is at fault; a body that the server does not fully
understand is refused. Started by ``areal.engine.inference.launch``, or by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from areal.api.config.inference import NativeConfig
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.native import wire
from areal.engine.native.requests import InvalidRequestError
from areal.engine.native.weight_routes import WeightRoutes
from areal.infra.rpc.identity import read_token
from areal.utils import logging
from areal.utils.errors import ArealError, EngineStoppedError, WeightSyncError
from areal.utils.network import format_hostport

if TYPE_CHECKING:
    from areal.engine.native.engine import NativeEngine

logger = logging.getLogger("NativeServer")

_EXIT_S = 1.8  # from a signal to the end of the process, whatever hangs
_SHUTDOWN_S = 0.5  # for replies that are on their way
_MODES = {"abort": False, "keep": True, "retract": True, "in_place": True}  # the last two are SGLang's words for keep
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class NativeServer:
    """The routes over one started engine; everything here runs on the event loop's thread.

    Args:
        engine: generates.
        model_path: shown in ``/model_info``.
        token: what ``Authorization: Bearer`` must carry, everywhere but in ``/health``; None: no check.
        max_body_bytes: of one request.

    Attributes:
        failed: set when the engine has died, of ``failure``, whoever used it then.
    """

    def __init__(self, engine: NativeEngine, model_path: str, token: str | None, max_body_bytes: int) -> None:
        self.engine, self.model_path, self.token = engine, model_path, token
        self._max_body_bytes = max_body_bytes
        self.paused = False
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self._live: set[asyncio.Future[ModelResponse]] = set()
        self._pausing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        engine.on_failure = self._hear
        self.app = web.Application(middlewares=[self._guard], client_max_size=max_body_bytes)
        routes: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            **WeightRoutes(engine).table,
        }
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/model_info", self._info)
        for path, handle in routes.items():
            self.app.router.add_post(path, _with_body(handle if path == "/generate" else _to_the_end(handle)))

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks the token, and turns errors into JSON."""
        sent = request.headers.get("Authorization", "")
        if self.token is not None and request.path != "/health":
            expected = f"Bearer {self.token}"
            if not hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), expected.encode()):
                return _error(401, "Authorization must be 'Bearer' and the token of this server's --token-file")
        try:
            return await handler(request)
        except (InvalidRequestError, WeightSyncError) as exc:
            return _error(400, str(exc))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is longer than {self._max_body_bytes} bytes (--max-body-mb of the server)")
        except web.HTTPException as exc:
            return _error(exc.status, f"{request.method} {request.path}: {exc.reason}")
        except EngineStoppedError as exc:
            return _error(503, str(exc))
        except Exception as exc:  # noqa: BLE001 - one request ends, with the reason
            logger.error(f"{request.method} {request.path} failed", exc_info=exc)
            return _error(500, f"{type(exc).__name__}: {exc}")

    def _hear(self, error: BaseException) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _generate(self, body: dict[str, Any]) -> Any:
        call = wire.read_generate(body, self.engine.tokenizer)
        futures: list[tuple[ModelRequest, asyncio.Future[ModelResponse]]] = []
        try:
            for request in call.requests:
                futures.append((request, self._submit(request)))
            replies = [await self._reply(request, future, call.logprobs) for request, future in futures]
        except BaseException:  # refused half-way, or the client is gone: nobody waits for the others
            for request, future in futures:
                if not future.done():
                    self.engine.abort(request.rid)
            raise
        return replies if call.many else replies[0]

    def _submit(self, request: ModelRequest) -> asyncio.Future[ModelResponse]:
        if request.gconfig.max_new_tokens == 0:
            nothing: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
            nothing.set_result(ModelResponse(list(request.input_ids), stop_reason="length"))
            return nothing
        future = asyncio.wrap_future(self.engine.submit(request))
        self._live.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[ModelResponse]) -> None:
        """On the loop, like all that touches ``_live``; its client may be gone."""
        self._live.discard(future)
        if not future.cancelled():
            future.exception()  # taken, or asyncio would report it

    async def _reply(self, request: ModelRequest, future: asyncio.Future[ModelResponse], logprobs: bool) -> Any:
        response = await asyncio.shield(future)
        return wire.write_reply(request, response, self.engine.get_version(), self.engine.tokenizer, logprobs)

    async def _abort(self, body: dict[str, Any]) -> Any:
        if wire.take(body, "abort_all", bool, False):
            self.engine.abort()
        else:
            self.engine.abort(wire.take(body, "rid", str))
        return {}

    async def _flush(self, _: dict[str, Any]) -> Any:
        return {"success": True, "message": "no cache outlives its request"}

    async def _pause(self, body: dict[str, Any]) -> Any:
        mode = wire.take(body, "mode", str, "abort")
        if mode not in _MODES:
            raise InvalidRequestError(f"mode={mode!r} must be one of {', '.join(_MODES)}")
        async with self._pausing:
            if not self.paused:
                await asyncio.to_thread(self.engine.pause)
                self.paused = True
            if not _MODES[mode] and self._live:
                ending = list(self._live)
                self.engine.abort()
                await asyncio.wait(ending)
        return {"status": "ok", "mode": mode}

    async def _continue(self, _: dict[str, Any]) -> Any:
        async with self._pausing:
            if self.paused:
                self.paused = False
                self.engine.resume()
        return {"status": "ok"}

    # -- state ---------------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        if self.failure is not None:
            return _error(503, f"the engine failed: {self.failure}")
        return web.json_response({"status": "ok", "paused": self.paused, "weight_version": self.engine.get_version()})

    async def _info(self, _: web.Request) -> web.Response:
        engine = self.engine
        return web.json_response(
            {
                "model_path": self.model_path,
                "is_generation": True,
                "weight_version": str(engine.get_version()),
                "vocab_size": engine.limits.vocab_size,
                "max_seq_len": engine.limits.max_seq_len,
                "eos_ids": sorted(engine.limits.eos_ids),
                "dtype": str(engine.dtype).removeprefix("torch."),
                "device": str(engine.device),
                "group_ranks": engine.group_ranks,
                "paused": self.paused,
                "running": engine.stats.running,
                "waiting": engine.stats.waiting,
            }
        )


def _to_the_end(handle: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    """``handle``, which goes on when its client leaves: half of a pause or of an update is no state to be in."""
    running: set[asyncio.Future[Any]] = set()

    def ended(task: asyncio.Future[Any]) -> None:
        running.discard(task)
        if not task.cancelled():
            task.exception()  # taken: the client that it was for may be gone

    async def whole(body: Any) -> Any:
        task = asyncio.ensure_future(handle(body))
        running.add(task)
        task.add_done_callback(ended)
        return await asyncio.shield(task)

    return whole


def _with_body(handle: Callable[[Any], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that reads the JSON object first; an empty body is an empty object."""

    async def handler(request: web.Request) -> web.Response:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError) as exc:
            raise InvalidRequestError(f"the body is not JSON: {exc}") from exc
        if not isinstance(body, dict):
            raise InvalidRequestError(f"the body must be a JSON object, not {type(body).__name__}")
        return web.json_response(await handle(body))

    return handler


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"success": False, "message": message, "error": {"message": message}}, status=status)


@dataclass
class ServerOptions:
    """What the command line says; see its help."""

    model_path: str
    tokenizer_path: str | None
    host: str
    port: int
    native: NativeConfig
    device: str | None
    weight_version: int
    token_file: str | None
    max_body_mb: int


def parse_options(argv: Sequence[str] | None = None) -> ServerOptions:
    """Options of a command line; ends the program with a message for a wrong one."""
    defaults = NativeConfig()
    parser = argparse.ArgumentParser(prog="python -m areal.engine.native.server", description=__doc__.split("\n")[0])
    parser.add_argument("--model-path", required=True, help="Hugging Face directory")
    parser.add_argument("--tokenizer-path", help="default: the model's; 'none' serves token ids without stop strings")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one, which the log names")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's")
    parser.add_argument("--device", help="default: the GPU if there is one, else the CPU")
    for flag in ("max_running_requests", "max_seq_len", "num_threads", "recompute_tokens_per_step",
                 "prefill_tokens_per_step"):  # fmt: skip
        parser.add_argument(f"--{flag.replace('_', '-')}", type=int, default=getattr(defaults, flag))
    parser.add_argument("--no-share-prefill", action="store_true", help="compute equal prompts again")
    parser.add_argument("--weight-version", type=int, default=0, help="version of the weights in --model-path")
    parser.add_argument("--token-file", help="requests must carry what it holds as a bearer token")
    parser.add_argument("--max-body-mb", type=int, default=64, help="longest request body, in MiB")
    args = parser.parse_args(argv)
    native = NativeConfig(
        max_running_requests=args.max_running_requests,
        max_seq_len=args.max_seq_len,
        dtype=args.dtype,
        recompute_tokens_per_step=args.recompute_tokens_per_step,
        prefill_tokens_per_step=args.prefill_tokens_per_step,
        num_threads=args.num_threads,
        share_prefill=not args.no_share_prefill,
    )
    names = ("model_path", "tokenizer_path", "host", "port", "device", "weight_version", "token_file", "max_body_mb")
    return ServerOptions(native=native, **{name: getattr(args, name) for name in names})


def build_engine(options: ServerOptions) -> NativeEngine:
    """The engine, not started."""
    from areal.engine.native.engine import NativeEngine
    from areal.utils.hf_utils import load_hf_tokenizer

    tokenizer = None
    if options.tokenizer_path != "none":
        tokenizer = load_hf_tokenizer(options.tokenizer_path or options.model_path)
    engine = NativeEngine(options.native, options.model_path, tokenizer=tokenizer, device=options.device)
    engine.set_version(options.weight_version)
    return engine


async def serve(options: ServerOptions, engine: NativeEngine) -> int:
    """Serve until SIGTERM, SIGINT or the engine's failure; returns the exit code."""
    token = read_token(options.token_file) if options.token_file else None
    server = NativeServer(engine, options.model_path, token, options.max_body_mb << 20)
    ending = server.failed
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _end_soon, ending)
    runner = web.AppRunner(server.app, access_log=None, shutdown_timeout=_SHUTDOWN_S, handler_cancellation=True)
    await runner.setup()
    engine.start()
    site = web.TCPSite(runner, options.host, options.port)
    try:
        await site.start()
        address = format_hostport(options.host, runner.addresses[0][1])
        if token is None and options.host not in _LOOPBACK:
            logger.warning(f"{address} is open to others without a token: give --token-file")
        logger.info(f"serving {options.model_path} v{engine.get_version()} on {address}")
        await ending.wait()
    finally:
        if server.failure is not None:
            _exit_within(1)  # a thread that waits in a weight group would keep the process
        await asyncio.to_thread(engine.stop)  # requests end as aborted; their replies go out before the runner ends
        await runner.cleanup()
    return 0 if server.failure is None else 1


def _end_soon(ending: asyncio.Event) -> None:
    """Have the server end; the process ends in any case."""
    _exit_within(0)
    ending.set()


def _exit_within(code: int) -> None:
    timer = threading.Timer(_EXIT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model and serve it; returns the exit code."""
    options = parse_options(argv)
    try:
        return asyncio.run(serve(options, build_engine(options)))
    except (ArealError, OSError, ValueError) as exc:
        logger.error(f"{type(exc).__name__}: {exc}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
