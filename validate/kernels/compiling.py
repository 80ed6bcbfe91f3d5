"""Compiles a kernel to machine code without a GPU, and reads what it uses: shared memory, registers, spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
from overlapsim.validate.kernels.architectures import Architecture, blocks_per_sm
from overlapsim.validate.kernels.checks import INTERPRETED
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overlapsim.errors import StrategyError, UsageError

TYPE_NAMES: Final = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32", "tf32": "*fp32"}
_DIVISIBLE: Final = ("tt.divisibility", 16)
# "REG:252 STACK:96 ..."; what does not fit in registers is spilled to the stack.
_USAGE: Final = re.compile(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)")


@dataclass(frozen=True)
class Variant:
    """One kernel in one specialisation.

    Attributes
    ----------
    name : for tables and messages
    kernel : the Triton function
    pointers : element type of each pointer argument, such as ``*bf16``
    constants : compile-time arguments; integer arguments among them (a stride of 1) become constants too
    unaligned : integer arguments that need not be multiples of 16; pointers and the others are taken as such
    floats : arguments of type fp32
    warps, stages : launch options
    """

    name: str
    kernel: Any
    pointers: Mapping[str, str]
    constants: Mapping[str, Any]
    unaligned: frozenset[str] = frozenset()
    floats: frozenset[str] = frozenset()
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Compiled:
    """What a variant became on one architecture.

    Attributes
    ----------
    variant, architecture : name of each
    shared_bytes, shared_limit_bytes : of one block
    registers : of one thread
    spilled_bytes : stack of one thread
    warps : of one block
    blocks_per_sm : blocks that an SM runs at once
    ptx : assembly text
    """

    variant: str
    architecture: str
    shared_bytes: int
    shared_limit_bytes: int
    registers: int
    spilled_bytes: int
    warps: int
    blocks_per_sm: int
    ptx: str

    @property
    def fits(self) -> bool:
        """Whether a block can be launched at all."""
        return self.shared_bytes <= self.shared_limit_bytes

    def require_fit(self) -> None:
        """Refuse what the compiler let pass but no GPU of the architecture launches.

        Raises
        ------
        StrategyError
            Naming kernel, architecture, what is needed and what there is.
        """
        if not self.fits:
            raise StrategyError(
                f"{self.variant} needs {self.shared_bytes} bytes of shared memory a block; {self.architecture} has "
                f"{self.shared_limit_bytes}: take a smaller tile or fewer stages"
            )


def compile_for(variant: Variant, architecture: Architecture) -> Compiled:
    """Compile down to machine code.

    Raises
    ------
    UsageError
        In the interpreter, which leaves nothing to compile.
    StrategyError
        If the assembler gives up.
    """
    if INTERPRETED:
        raise UsageError("kernels were loaded for the interpreter; unset TRITON_INTERPRET to compile them")
    names = variant.kernel.arg_names
    signature, attributes = {}, {}
    for place, name in enumerate(names):
        kind = _kind(variant, name)
        signature[name] = kind
        if kind.startswith("*") or (kind == "i32" and name not in variant.unaligned):
            attributes[(place,)] = [list(_DIVISIBLE)]
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    try:
        built = triton.compile(source, target=GPUTarget("cuda", architecture.sm, 32), options=options)
    except RuntimeError as error:
        raise StrategyError(f"{variant.name} does not compile for {architecture.name}: {error}") from None
    registers, spilled = resources(built.asm["cubin"])
    return Compiled(
        variant=variant.name,
        architecture=architecture.name,
        shared_bytes=built.metadata.shared,
        shared_limit_bytes=architecture.shared_limit_bytes,
        registers=registers,
        spilled_bytes=spilled,
        warps=variant.warps,
        blocks_per_sm=blocks_per_sm(
            architecture, registers=registers, warps=variant.warps, shared_bytes=built.metadata.shared
        ),
        ptx=built.asm["ptx"],
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the CUDA tools beside Triton read them from machine code.

    Raises
    ------
    UsageError
        If the tool is missing or says something else.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        try:
            answer = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UsageError(f"cuobjdump of the triton package failed: {error}; install triton for Linux") from None
    found = _USAGE.findall(answer.stdout)
    if len(found) != 1:
        raise UsageError(f"cuobjdump listed {len(found)} kernels; expected one")
    registers, stack, local = (int(number) for number in found[0])
    return registers, stack + local


def _kind(variant: Variant, name: str) -> str:
    if name in variant.constants:
        return "constexpr"
    if name in variant.floats:
        return "fp32"
    return variant.pointers.get(name, "i32")
