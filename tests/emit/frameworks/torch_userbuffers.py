"""Run Transformer Engine's own `initialize_ub` on userbuffer files: its Python code, with the CUDA layer recorded.

``python torch_userbuffers.py BASE TP FILE...``: BASE is ``transformer_engine/pytorch/module/base.py`` of a version (the
package itself cannot be imported without CUDA). Prints a JSON line a file: the buffers made, or the error.
"""

from __future__ import annotations

import ast
import enum
import json
import os
import sys
import types
import typing
import warnings
from pathlib import Path
from typing import Any

WANTED = ("initialize_ub", "UserBufferQuantizationMode")


class _Anything:
    """Answers every attribute and call with itself."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self


def run(base: Path, tp: int, path: Path) -> dict[str, Any]:
    """Make the buffers of one file."""
    import torch
    import yaml

    made: dict[str, Any] = {}

    def recorder(kind: str) -> Any:
        def record(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"kind": kind, **{k: v for k, v in kwargs.items() if isinstance(v, bool | int | str)}}

        return record

    tex = _Anything()
    for name, value in (
        ("CommOverlap", recorder("kernel")),
        ("CommOverlapP2P", recorder("ring")),
        ("UbufCommOverlap", recorder("kernel")),
        ("UbufP2PCommOverlap", recorder("ring")),
        ("ubuf_built_with_mpi", lambda: False),
        ("device_supports_multicast", lambda: True),
        ("get_stream_priority_range", lambda: (0, -5)),
        ("CommOverlapHelper", lambda *_: None),
        ("CommOverlapType", types.SimpleNamespace(RS="RS", AG="AG")),
    ):
        tex.__dict__[name] = value
    distributed = types.SimpleNamespace(
        is_initialized=lambda: True,
        is_mpi_available=lambda: False,
        is_gloo_available=lambda: True,
        is_backend_available=lambda _: True,
        new_group=lambda **_: None,
        get_rank=lambda *_: 0,
        get_world_size=lambda *_: tp,
        all_gather_object=lambda *_: None,  # all names stay None: one node
        get_process_group_ranks=lambda *_: list(range(tp)),
        new_subgroups_by_enumeration=lambda *_, **__: (None, None),
        Backend=str,
    )
    scope: dict[str, Any] = {
        **vars(typing),
        "torch": types.SimpleNamespace(
            distributed=distributed,
            uint8="uint8",
            empty=_Anything(),
            bfloat16="bf16",
            dtype=str,
            Tensor=torch.Tensor,
            cuda=_Anything(),
        ),
        "tex": tex,
        "os": os,
        "socket": types.SimpleNamespace(gethostname=lambda: "node"),
        "warnings": warnings,
        "Enum": enum.Enum,
        "_ub_communicators": None,
        "_ub_with_cublasmp": False,
        "_NUM_MAX_UB_STREAMS": 3,
        "_MIN_STREAM_PRIORITY": None,
        "_MAX_STREAM_PRIORITY": None,
        "layers_atomic_ring_exchange": [],
        "get_workspace": _Anything(),
        "_cublas_workspace": None,
    }
    tree = ast.parse(base.read_text(encoding="utf-8"))
    kept = [node for node in tree.body if getattr(node, "name", "") in WANTED]
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *kept], []), str(base), "exec"), scope)
    try:
        scope["initialize_ub"](
            [4096, 8192], tp, ub_cfgs=yaml.safe_load(path.read_text(encoding="utf-8")), **_modes(scope)
        )
    except Exception as error:
        return {"file": path.name, "error": f"{type(error).__name__}: {error}", "buffers": {}}
    made = {key[0] if isinstance(key, tuple) else key: value for key, value in scope["_ub_communicators"].items()}
    return {"file": path.name, "error": "", "buffers": made}


def _modes(scope: dict[str, Any]) -> dict[str, Any]:
    mode = scope.get("UserBufferQuantizationMode")
    if mode is not None:
        return {"quantization_modes": [mode.NONE], "dtype": "bf16", "bootstrap_backend": "gloo"}
    return {"use_fp8": False, "dtype": "bf16", "bootstrap_backend": "gloo"}


def main() -> None:
    """Run the files that are named."""
    warnings.simplefilter("ignore")
    base, tp, *paths = sys.argv[1:]
    sys.stdout, out = sys.stderr, sys.stdout
    found = [run(Path(base), int(tp), Path(path)) for path in paths]
    for entry in found:
        print(json.dumps(entry), file=out)


if __name__ == "__main__":
    main()
