"""FP8 GEMMs by NVIDIA's cuBLASLt, for the two things that torch's own call to it lacks: adding to the output, and
blocks with fp32 scales.

torch._scaled_mm writes a new matrix. A weight's gradient is added to a buffer, though. In the GEMM this reads and
writes the buffer once; with torch and a separate addition, a second matrix is written and read as well. The library is
the one that torch has loaded; its C interface (cublasLt.h of CUDA 12.9 and later, where the numbers of enumerations do
not change) is called through ctypes. ops.quantized.recipes.scaled_product defines what is computed.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx.base.align import BYTES
from phalanx.base.dataclass import dataclass
from phalanx.ops.quantized.recipes import Block, Scaled

TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # cudaDataType
COMPUTE_FP32 = 68  # cublasComputeType_t
TRANSPOSE_A, A_SCALES, B_SCALES, FAST_SUMS, A_KIND, B_KIND = 3, 17, 18, 25, 31, 32  # cublasLtMatmulDescAttributes_t
WORKSPACE, ALIGN_A, ALIGN_B, ALIGN_C, ALIGN_D = 1, 5, 6, 7, 8  # cublasLtMatmulPreferenceAttributes_t
KINDS: dict[Block, int] = {(0, 0): 0, (1, 0): 3, (1, 128): 4, (128, 128): 5}  # cublasLtMatmulMatrixScale_t
MOST_WORKSPACE = 32 * 2**20  # bytes; NVIDIA's recommendation for Hopper


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm for a GEMM."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True)
class Gemm:
    """out (M, N) (+)= a (M, K) b^T with b (N, K), all with contiguous rows.

    dtypes, aligned  of a, b and out; `aligned` are powers of two, in bytes, that their addresses are multiples of
    """

    m: int
    n: int
    k: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    blocks: tuple[Block, Block]
    fast: bool
    add: bool
    aligned: tuple[int, int, int]


@dataclass(frozen=True)
class _Plan:
    a: c_void_p
    b: c_void_p
    out: c_void_p
    choice: _Choice


class CublasLt:
    """The library on one GPU. Matrices are row-major here and column-major there, so `b` here is its A, transposed."""

    def __init__(self, library: ctypes.CDLL, device: torch.device):
        self._library, self._device = library, device
        self._plans: dict[Gemm, _Plan | None] = {}
        self._handle = c_void_p()
        with torch.cuda.device(device):
            self._call("cublasLtCreate", byref(self._handle))

    def product(self, out: Tensor, a: Scaled, b: Scaled, fast: bool, add: bool) -> bool:
        """out (M, N) (+)= a b^T; False, with nothing done, if the library has no such GEMM."""
        blocks = a.block, b.block
        if not all(block in KINDS for block in blocks):
            return False
        (m, k), n = a.quantized.shape, len(b.quantized)
        tensors = a.quantized, b.quantized, out
        dtypes, aligned = (a.quantized.dtype, b.quantized.dtype, out.dtype), tuple(_alignment(t) for t in tensors)
        gemm = Gemm(m, n, k, dtypes, blocks, fast, add, aligned)  # type: ignore[arg-type]
        if not (fits(gemm) and all(t.is_contiguous() for t in tensors)):
            return False
        a_scales, b_scales = (scales_in_order(q) for q in (a, b))
        description = describe(self._library, gemm, a_scales.data_ptr(), b_scales.data_ptr())
        if gemm not in self._plans:
            self._plans[gemm] = self._planned(gemm, description)
        plan = self._plans[gemm]
        if plan is not None:
            self._run(plan, description, gemm, out, a, b)
        self._call("cublasLtMatmulDescDestroy", description)
        return plan is not None

    def _planned(self, gemm: Gemm, description: c_void_p) -> _Plan | None:
        a, b, out = layouts(self._library, gemm)
        choice, found, preference = _Choice(), c_int(), c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        aligned = zip((ALIGN_B, ALIGN_A, ALIGN_C, ALIGN_D), (*gemm.aligned, gemm.aligned[2]))
        for attribute, value in (
            (WORKSPACE, c_uint64(MOST_WORKSPACE)),
            *((what, c_uint32(size)) for what, size in aligned),
        ):
            self._call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value), sizeof(value))
        ask = self._library.cublasLtMatmulAlgoGetHeuristic
        status = ask(self._handle, description, b, a, out, out, preference, 1, byref(choice), byref(found))
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return _Plan(a, b, out, choice) if status == 0 and found.value > 0 and choice.state == 0 else None

    def _run(self, plan: _Plan, description: c_void_p, gemm: Gemm, out: Tensor, a: Scaled, b: Scaled) -> None:
        workspace = torch.empty(plan.choice.workspace, dtype=torch.uint8, device=out.device)
        a_at, b_at, out_at, workspace_at = (c_void_p(t.data_ptr()) for t in (a.quantized, b.quantized, out, workspace))
        one, before = c_float(1.0), c_float(float(gemm.add))
        stream = c_void_p(torch.cuda.current_stream(out.device).cuda_stream)
        self._call(
            "cublasLtMatmul",
            self._handle,
            description,
            byref(one),
            b_at,
            plan.b,
            a_at,
            plan.a,
            byref(before),
            out_at,
            plan.out,
            out_at,
            plan.out,
            byref(plan.choice),
            workspace_at,
            plan.choice.workspace,
            stream,
        )

    def _call(self, name: str, *arguments: Any) -> None:
        called(self._library, name, *arguments)


def called(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of the library; RuntimeError if it fails."""
    status = getattr(library, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: cuBLAS status {status}")


def fits(gemm: Gemm) -> bool:
    """Whether the library supports a GEMM of 8-bit operands: its alignment, E5M2 on at most one side, whole blocks, and
    four blocks along the sum (cuBLAS, "Scaling factors layouts": the rows of the scales of 128 x 128 blocks are
    multiples of four)."""
    blocks = [block for block in gemm.blocks if 128 in block]
    whole = not blocks or (
        len(blocks) == 2 and blocks != [(128, 128)] * 2 and gemm.m % 128 == gemm.n % 128 == gemm.k % 512 == 0
    )
    lines = ((1, 0) in gemm.blocks) <= (gemm.blocks == ((1, 0), (1, 0)))
    types = gemm.dtypes[:2] != (torch.float8_e5m2, torch.float8_e5m2) and all(t in TYPES for t in gemm.dtypes)
    return (
        types
        and whole
        and lines
        and gemm.n % 16 == gemm.k % 16 == 0
        and min(gemm.aligned) >= BYTES
        and min(gemm.m, gemm.n, gemm.k) > 0
    )


def scales_in_order(q: Scaled) -> Tensor:
    """Scales in the order in which the library reads them: those of 1 x 128 blocks column by column, those of 128 x 128
    blocks row by row."""
    return q.scales.contiguous() if q.block != (1, 128) else q.scales.t().contiguous()


def describe(library: ctypes.CDLL, gemm: Gemm, a_scales: int, b_scales: int) -> c_void_p:
    """A cublasLtMatmulDesc_t with operands, transposes, scales and the kind of sum."""
    made = c_void_p()
    called(library, "cublasLtMatmulDescCreate", byref(made), COMPUTE_FP32, TYPES[torch.float32])
    a_kind, b_kind = (KINDS[block] for block in gemm.blocks)
    values = {
        TRANSPOSE_A: c_int32(1),
        FAST_SUMS: c_int8(gemm.fast),
        A_SCALES: c_void_p(b_scales),
        B_SCALES: c_void_p(a_scales),
    }
    if a_kind or b_kind:  # older libraries support only one scale for each tensor, and lack these attributes
        values |= {A_KIND: c_int32(b_kind), B_KIND: c_int32(a_kind)}
    for attribute, value in values.items():
        called(library, "cublasLtMatmulDescSetAttribute", made, attribute, byref(value), sizeof(value))
    return made


def layouts(library: ctypes.CDLL, gemm: Gemm) -> tuple[c_void_p, c_void_p, c_void_p]:
    """cublasLtMatrixLayout_t of a, b and the output."""
    a, b, out = c_void_p(), c_void_p(), c_void_p()
    for made, dtype, rows, columns in zip((a, b, out), gemm.dtypes, (gemm.k, gemm.k, gemm.n), (gemm.m, gemm.n, gemm.m)):
        called(library, "cublasLtMatrixLayoutCreate", byref(made), TYPES[dtype], rows, columns, rows)
    return a, b, out


def load(path: str) -> ctypes.CDLL | None:
    """The library, with the types of the functions called here; None if it cannot be loaded."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    handle, made, value = c_void_p, POINTER(c_void_p), c_void_p
    signatures: dict[str, list[Any]] = {
        "cublasLtCreate": [made],
        "cublasLtMatmulDescCreate": [made, c_int, c_int],
        "cublasLtMatmulDescSetAttribute": [handle, c_int, value, c_size_t],
        "cublasLtMatmulDescDestroy": [handle],
        "cublasLtMatrixLayoutCreate": [made, c_int, c_uint64, c_uint64, c_int64],
        "cublasLtMatmulPreferenceCreate": [made],
        "cublasLtMatmulPreferenceSetAttribute": [handle, c_int, value, c_size_t],
        "cublasLtMatmulPreferenceDestroy": [handle],
        "cublasLtMatmulAlgoGetHeuristic": [*[handle] * 7, c_int, POINTER(_Choice), POINTER(c_int)],
        "cublasLtMatmul": [
            handle,
            handle,
            value,
            value,
            handle,
            value,
            handle,
            value,
            value,
            handle,
            value,
            handle,
            value,
            value,
            c_size_t,
            value,
        ],
    }
    for name, types in signatures.items():
        getattr(library, name).argtypes, getattr(library, name).restype = types, c_int
    return library


def _alignment(x: Tensor) -> int:
    """The largest power of two up to 256 that the address is a multiple of."""
    at = x.data_ptr() | 256
    return at & -at


@cache
def library() -> ctypes.CDLL | None:
    """The library of the CUDA that torch was built for; None if it is not available."""
    return None if torch.version.cuda is None else load(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


@cache
def cublaslt(index: int) -> CublasLt | None:
    """The library on GPU number `index`."""
    found = library()
    return None if found is None else CublasLt(found, torch.device("cuda", index))
