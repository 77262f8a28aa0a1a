"""Every op × implementation × case against the float64 definition, and the definitions against plain arithmetic.

Triton kernels run on the GPU where there is one. Elsewhere they run in Triton's interpreter, in a second process: the
interpreter is chosen when triton is imported, and nothing else in the suite should be slowed down by it.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
import timeit
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.ops import activation, registry, rms_norm, rotary, vocabulary_ends
from ridgeline.ops.attention import attention_reference, fused_decode, kv_write, paged_attention, qkv_write
from ridgeline.ops.attention.attention_arguments import largest_code
from ridgeline.ops.experts import experts_op, route, router
from ridgeline.ops.latent import fused_latent, latent_attention, latent_write
from ridgeline.ops.linear import gguf_blocks, linear_op
from ridgeline.ops.packed import packed_linear
from ridgeline.ops.packed.packed_weight import PackedWeight
from ridgeline.ops.quantised import quantised_linear
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.ops.registry import REGISTRY, TRITON_INTERPRETED, Implementation, Op, Site
from ridgeline.ops.sampling import logprobs, sample
from ridgeline.sizes.op_costs import Case

OPS: list[Op[Any, Any]] = [
    rms_norm.rms_norm, rotary.rotary, activation.gated_activation, kv_write.kv_write,
    paged_attention.paged_attention, logprobs.logprobs, linear_op.linear, linear_op.normed_linear, gguf_blocks.block_linear,
    qkv_write.rotary_write, sample.apply_mask, fused_decode.decode_attention, quantised_linear.quantised_linear,
    packed_linear.packed_linear, packed_linear.normed_packed_linear, vocabulary_ends.embedding, vocabulary_ends.soft_cap,
    quantised_linear.normed_quantised_linear,
    latent_write.latent_write, latent_attention.latent_attention, fused_latent.latent_decode, route.route, router.route_rows,
    router.normed_route_rows, experts_op.experts,
]
CUDA = torch.cuda.is_available()
# Only Hopper's kernels multiply packed experts. In the interpreter they become plain numbers, as in the smallest case.
EXPANDED = ("packed-two", "packed-few", "packed-two-int4", "packed-some", "packed-many", "packed-most")
# Sizes for Hopper's tiles: seconds each on a CPU without bfloat16. Its definition has no tiles, and other cases have their codes.
TILED = ("packed-two-int4", "packed-many", "packed-most")
# Seconds each in the interpreter, and other cases of these ops have the same kernels, tiles, codes and scales.
LONG = {
    "experts": ("two-long", "codes-fp8-one", "codes-int4-many", "codes-few", "shared-odd"), "latent_attention": ("many-heads",),
}


def device_of(op: Op[Any, Any], implementation: Implementation, dtype: torch.dtype, gpu: bool = CUDA) -> str | None:
    """Where this implementation can run here; None if nowhere."""
    if implementation.name == "triton" and TRITON_INTERPRETED:
        return "cpu" if implementation.supports(Site("cuda", dtype, 64)) else None
    for device in ("cuda", "cpu") if gpu and op is not gguf_blocks.block_linear else ("cpu",):       # its Matrix is a CPU's
        if implementation.supports(Site(device, dtype, 64)):
            return device
    return None


def is_slow(
    op: Op[Any, Any], implementation: Implementation, case: Case, dtype: str, interpreted: bool = TRITON_INTERPRETED
) -> bool:
    """In the interpreter a case takes seconds: there it has one type on every commit, by turns. The sizes that benchmarks have
    are large for a definition."""
    if not interpreted:
        return not CUDA and (case.name in TILED or (case.timed and implementation.name == "reference"))
    if case.name in EXPANDED or case.name in LONG.get(op.name, ()):
        return True
    types = [each for each in case.dtypes if each != "float64"]
    return types[op.cases.index(case) % len(types)] != dtype


def all_checks() -> list[Any]:
    checks = []
    for op in OPS:
        for implementation in op.implementations:
            for case in op.cases:
                for dtype in case.dtypes:
                    if dtype == "float64" or device_of(op, implementation, getattr(torch, dtype)) is None:
                        continue
                    if case.timed and implementation.name == "triton" and TRITON_INTERPRETED:
                        continue                         # minutes, in the interpreter
                    checks.append(pytest.param(
                        op, implementation, case, dtype, id=f"{op.name}-{implementation.name}-{case.name}-{dtype}",
                        marks=pytest.mark.slow if is_slow(op, implementation, case, dtype) else (),
                    ))
    return checks


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def make_inputs(op: Op[Any, Any], case: Case, dtype: torch.dtype, device: str) -> Inputs:
    return op.inputs(torch.Generator().manual_seed(len(case.name)), dtype, device, **case.sizes)


def widened(value: Any) -> Any:
    if isinstance(value, QuantisedWeight):               # codes and scales are exact as they are
        return QuantisedWeight(*(each.cpu() if isinstance(each, torch.Tensor) else each for each in value))
    if isinstance(value, PackedWeight):
        tensors = {name: getattr(value, name) for name in ("codes", "scale", "zero", "outer")}
        return replace(value, **{name: None if each is None else each.cpu() for name, each in tensors.items()})
    if isinstance(value, tuple):                         # the scales of both products of experts
        return tuple(map(widened, value))
    return value.to("cpu", torch.float64) if isinstance(value, torch.Tensor) and value.is_floating_point() else (
        value.cpu() if isinstance(value, torch.Tensor) else value
    )


def results(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returns; or, if it returns nothing, the arguments it has changed."""
    returned = function(*args, **kwargs)
    if returned is None:
        return [value for value in args if isinstance(value, torch.Tensor)]
    return list(returned) if isinstance(returned, tuple) else [returned]


@pytest.mark.reliability("P-13")
@pytest.mark.parametrize(("op", "implementation", "case", "dtype"), all_checks())
def test_implementation_matches_the_float64_definition(
    op: Op[Any, Any], implementation: Implementation, case: Case, dtype: str
) -> None:
    device = device_of(op, implementation, getattr(torch, dtype))
    assert device is not None
    args, kwargs = make_inputs(op, case, getattr(torch, dtype), device)
    if implementation.name == "native" and not implementation.supports(Site(device, getattr(torch, dtype), args[0].shape[-1])):
        pytest.skip("this width runs the definition")
    wide_args = tuple(widened(value) for value in args)
    wide_kwargs = {name: widened(value) for name, value in kwargs.items()}
    expected = results(op.implementations[-1].function, wide_args, wide_kwargs)
    actual = results(implementation.function, args, kwargs)
    assert len(actual) == len(expected)
    tolerance = op.tolerance[dtype]
    # Where hardware rounds to the nearest narrow number, the interpreter cuts: twice the error.
    slack = 2 if device == "cpu" and implementation.name == "triton" and dtype != "float32" else 1
    for got, wanted in zip(actual, expected, strict=True):
        assert got.shape == wanted.shape
        if got.is_floating_point():
            assert got.dtype == getattr(torch, dtype)
            torch.testing.assert_close(
                got.cpu().double(), wanted, rtol=slack * tolerance.relative, atol=slack * tolerance.absolute
            )
        else:
            assert torch.equal(got.cpu(), wanted)


def devices(value: Any) -> set[str]:
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    fields = value if isinstance(value, tuple) else (getattr(value, name) for name in getattr(value, "__slots__", ()))
    return {device for each in fields for device in devices(each)}


@pytest.mark.parametrize("name", ["packed_linear", "normed_packed_linear", "quantised_linear", "normed_quantised_linear"])
def test_the_float64_definition_gets_every_tensor_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are records of tensors: one that stayed on the GPU would meet an x on the CPU. `meta` stands for the GPU."""
    args, _ = make_inputs(REGISTRY[name], REGISTRY[name].cases[0], torch.bfloat16, "cpu")
    moved: list[str] = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append("cpu") or tensor.to("meta"))
    weight = next(value for value in args if isinstance(value, PackedWeight | QuantisedWeight))
    assert devices(weight) == {"cpu"} and devices(widened(weight)) == {"meta"} and moved


def test_an_op_of_the_cpu_is_tested_there_on_a_gpu_machine() -> None:
    where = {op.name: device_of(op, op.implementations[-1], torch.float32, gpu=True) for op in OPS}
    assert where["block_linear"] == "cpu" and where["packed_linear"] == where["rotary"] == "cuda"


@pytest.mark.reliability("P-13")
@pytest.mark.skipif(CUDA or TRITON_INTERPRETED, reason="the kernels run in this process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("part", ["", "not "])           # halves, for two processes
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_triton_kernels_in_the_interpreter(marked: str, part: str, run_interpreted: Any) -> None:
    """Every kernel on every commit, each case with one type; the slow test has the other types, and cases that repeat."""
    selection = ["-k", f"float64_definition and triton and {part}(attention or latent)", "-m", marked]
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", __file__, *selection]
    run = run_interpreted(command)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = [line for line in run.stdout.splitlines() if line.startswith("PASSED ")]
    for op in (op for op in OPS if ("attention" in op.name or "latent" in op.name) == (not part)):
        kernels = [implementation for implementation in op.implementations if implementation.name == "triton"]
        wanted = sum(kernel.supports(Site("cuda", getattr(torch, dtype), 64))
                     for kernel in kernels for case in op.cases if not case.timed for dtype in case.dtypes
                     if dtype != "float64" and is_slow(op, kernel, case, dtype, interpreted=True) == (marked == "slow"))
        assert sum(f"[{op.name}-triton-" in line for line in passed) == wanted


# ── the definitions against plain arithmetic ─────────────────────────────────────────────────────────────────────────


def float64_cases(name: str) -> Any:
    small = [case for case in REGISTRY[name].cases if not case.timed]
    return pytest.mark.parametrize("case", small, ids=lambda case: case.name)


def float64_inputs(name: str, case: Case) -> Inputs:
    return make_inputs(REGISTRY[name], case, torch.float64, "cpu")


@float64_cases("rms_norm")
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_definition(case: Case, offset: float) -> None:
    (x, weight, eps), kwargs = float64_inputs("rms_norm", case)
    returned = rms_norm.rms_norm(x, weight, eps, **kwargs | {"weight_offset": offset})
    out = returned
    if "residual" in kwargs:
        out, residual = returned
        x = x + kwargs["residual"]
        assert torch.equal(residual, x)
    for got, row in zip(out.tolist(), x.tolist(), strict=True):
        root = math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
        wanted = [value / root * (w + offset) for value, w in zip(row, weight.tolist(), strict=True)]
        assert got == pytest.approx(wanted, rel=1e-13, abs=1e-15)


@float64_cases("normed_linear")
def test_normed_linear_definition(case: Case) -> None:
    (x, residual, norm, eps, weight, bias), options = float64_inputs("normed_linear", case)
    out, stream = linear_op.normed_linear(x, residual, norm, eps, weight, bias, **options)
    total = x if residual is None else x + residual
    assert torch.equal(stream, total)
    normed = rms_norm.rms_norm(total, norm, eps, weight_offset=options["norm_offset"])
    wanted = normed @ weight.T + (0 if bias is None else bias)
    if options["gate"] is not None:
        wanted = activation.gated_activation(wanted, options["gate"])
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-13)


@float64_cases("rotary")
def test_rotary_definition(case: Case) -> None:
    (q, k, positions, table), _ = float64_inputs("rotary", case)
    untouched = q.clone(), k.clone()
    half = table.shape[-1]
    for heads, out in zip(untouched, rotary.rotary(q, k, positions, table), strict=True):
        rotation = torch.complex(table[positions, 0], table[positions, 1]).unsqueeze(1)      # turning = multiplying
        turned = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * rotation
        wanted = torch.cat((turned.real, turned.imag, heads[..., 2 * half :]), dim=-1)
        torch.testing.assert_close(out, wanted, rtol=1e-14, atol=1e-14)


@float64_cases("gated_activation")
def test_gated_activation_definition(case: Case) -> None:
    (x, kind), _ = float64_inputs("gated_activation", case)
    act = {
        "silu": lambda g: g / (1 + math.exp(-g)),
        "gelu": lambda g: g * (1 + math.erf(g / math.sqrt(2))) / 2,
        "gelu_tanh": lambda g: g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2,
        "relu2": lambda g: max(g, 0.0) ** 2,
    }[kind]
    half = x.shape[1] // 2
    wanted = [[act(row[i]) * row[half + i] for i in range(half)] for row in x.tolist()]
    torch.testing.assert_close(
        activation.gated_activation(x, kind), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="'relu' is unknown"):
        activation.gated_activation(torch.zeros(1, 4), "relu")


def page_view(cache: torch.Tensor) -> torch.Tensor:
    """The same cache as one layer's slice of pages that hold several layers: strided over blocks."""
    unused = float("nan") if cache.is_floating_point() else 127
    pages = torch.full((cache.shape[0], 3, *cache.shape[1:]), unused, dtype=cache.dtype, device=cache.device)
    pages[:, 1] = cache
    return pages[:, 1]


@float64_cases("kv_write")
@pytest.mark.parametrize("strided", [False, True])
def test_kv_write_definition(case: Case, strided: bool) -> None:
    (k, v, k_cache, v_cache, slots), _ = float64_inputs("kv_write", case)
    before = k_cache.clone(), v_cache.clone()
    if strided:
        k_cache, v_cache = page_view(k_cache), page_view(v_cache)
    kv_write.kv_write(k, v, k_cache, v_cache, slots)
    size = k_cache.shape[1]
    for new, cache, old in ((k, k_cache, before[0]), (v, v_cache, before[1])):
        for token, slot in enumerate(slots.tolist()):
            old[slot // size, slot % size] = new[token]
        assert torch.equal(cache, old)


@float64_cases("rotary_write")
@pytest.mark.parametrize("strided", [False, True])
def test_rotary_write_definition(case: Case, strided: bool) -> None:
    """The ops it replaces, in their order."""
    (qkv, positions, slots, table, k_cache, v_cache), options = float64_inputs("rotary_write", case)
    heads, kv_heads = options["heads"], options["kv_heads"]
    q, k, v = qkv.clone().view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=1)
    if "q_norm" in options:
        q, k = (
            rms_norm.rms_norm_reference(part, options[f"{name}_norm"], options["eps"], weight_offset=1.0)
            for name, part in (("q", q), ("k", k))
        )
    q, k = rotary.rotary_reference(q, k, positions, table)
    wanted = k_cache.clone(), v_cache.clone()
    kv_write.kv_write_reference(k, v, *wanted, slots)
    if strided:
        k_cache, v_cache = page_view(k_cache), page_view(v_cache)
    assert torch.equal(qkv_write.rotary_write(qkv, positions, slots, table, k_cache, v_cache, **options), q)
    assert torch.equal(k_cache, wanted[0]) and torch.equal(v_cache, wanted[1])


TRITON_DEVICE = "cuda" if CUDA else "cpu"
runs_triton = pytest.mark.skipif(not (CUDA or TRITON_INTERPRETED), reason="no GPU, and not in the interpreter")


@runs_triton
@pytest.mark.parametrize("case", [case for case in qkv_write.rotary_write.cases if not case.timed], ids=lambda case: case.name)
@pytest.mark.parametrize("strided", [False, True], ids=["triton-whole", "triton-strided"])
def test_what_rotary_write_writes_is_the_float64_definition(case: Case, strided: bool) -> None:
    args, options = make_inputs(qkv_write.rotary_write, case, torch.float32, TRITON_DEVICE)
    wide = [widened(value) for value in args]
    qkv_write.rotary_write_reference(*wide, **{name: widened(value) for name, value in options.items()})
    caches = [page_view(cache) for cache in args[4:]] if strided else args[4:]
    qkv_write.rotary_write_triton(*args[:4], *caches, **options)
    for got, wanted in zip(caches, wide[4:], strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=4e-6, atol=4e-6)


@float64_cases("decode_attention")
def test_decode_attention_definition(case: Case) -> None:
    """The two ops it replaces; and the newest key and value, NaN before, are seen."""
    args, options = float64_inputs("decode_attention", case)
    qkv, positions, slots, table, k_cache, v_cache, *rest = args
    caches = k_cache.clone(), v_cache.clone()
    names = ("heads", "kv_heads", "q_norm", "k_norm", "eps", "norm_offset")
    write = {name: value for name, value in options.items() if name in names}
    q = qkv_write.rotary_write_reference(qkv.clone(), positions, slots, table, *caches, **write)
    wanted = paged_attention.paged_attention_reference(
        q, *caches, *rest, **{name: value for name, value in options.items() if name not in write}
    )
    assert torch.equal(fused_decode.decode_attention(*args, **options), wanted) and wanted.isfinite().all()
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip((k_cache, v_cache), caches, strict=True))


@runs_triton
@pytest.mark.parametrize("name", ["one-sinks", "first-of-a-block", "odd-norm", "padded", "strided"])
def test_what_decode_attention_writes_on_triton_is_the_float64_definition(name: str) -> None:
    op = fused_decode.decode_attention
    case = next(case for case in op.cases if case.name == ("odd-norm" if name == "strided" else name))
    args, options = make_inputs(op, case, torch.float32, TRITON_DEVICE)
    wide = [widened(value) for value in args]
    fused_decode.decode_attention_reference(*wide, **{key: widened(value) for key, value in options.items()})
    caches = [page_view(cache) if name == "strided" else cache for cache in args[4:6]]
    fused_decode.decode_attention_triton(*args[:4], *caches, *args[6:], **options)
    for got, wanted in zip(caches, wide[4:6], strict=True):                      # block 0 is padding's
        torch.testing.assert_close(got.cpu().double()[1:], wanted[1:], rtol=4e-6, atol=4e-6, equal_nan=True)


FLOATS = torch.float16 if TRITON_INTERPRETED else torch.float8_e4m3fn            # the interpreter cannot round to 8-bit floats


@runs_triton
@pytest.mark.parametrize(("name", "window", "stored", "calibrated"), [
    ("first-of-a-block", None, FLOATS, False), ("first-of-a-block", 5, FLOATS, False), ("one", None, torch.int8, False),
    ("first-of-a-block", None, torch.int8, False), ("first-of-a-block", None, FLOATS, True),
    ("first-of-a-block", None, torch.int8, True),
])
def test_decode_attention_with_scales_is_the_two_ops_on_triton_and_the_float64_definition(
    name: str, window: int | None, stored: torch.dtype, calibrated: bool
) -> None:
    """What is written is quantised before it is read, as if another kernel had written it. Calibrated scales stay as they are.
    The kernel of one row knows no scales: one row is the two ops themselves."""
    sizes = next(case.sizes for case in fused_decode.decode_attention.cases if case.name == name)
    args, options = fused_decode.decode_attention.inputs(
        torch.Generator().manual_seed(5), torch.float32, TRITON_DEVICE, **sizes | {"window": window}
    )
    shape = args[4].shape[:3]
    found = []
    for function in (fused_decode.decode_attention_triton, two_kernels):
        caches = [cache.nan_to_num().to(stored) for cache in args[4:6]]
        scales = [torch.linspace(0.01, 0.02, math.prod(shape), device=TRITON_DEVICE).view(shape) for _ in "kv"]
        if calibrated:
            scales = [torch.tensor([0.015, 0.02], device=TRITON_DEVICE).expand(shape) for _ in "kv"]
        out = function(*args[:4], *caches, *args[6:], **options, k_scale=scales[0], v_scale=scales[1])
        found.append([out, *(cache[1:].float() for cache in caches), *scales])
    for fused, apart in zip(*found, strict=True):
        torch.testing.assert_close(fused, apart, rtol=2e-3, atol=1e-5)


def two_kernels(
    qkv: torch.Tensor, positions: Any, slots: Any, table: Any, k: Any, v: Any, *rest: Any, heads: int, kv_heads: int,
    q_norm: Any = None, k_norm: Any = None, eps: float = 0.0, norm_offset: float = 0.0, **options: Any,
) -> torch.Tensor:
    scales = {name: options[name] for name in ("k_scale", "v_scale")}
    q = qkv_write.rotary_write_triton(
        qkv, positions, slots, table, k, v, heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm, eps=eps,
        norm_offset=norm_offset, **scales,
    )
    return paged_attention.paged_attention_triton(q, k, v, *rest, **options)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_rotary_write_with_scales(stored: torch.dtype) -> None:
    check_scales(qkv_write.rotary_write_reference, "cpu", stored, 0.5)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_calibrated_scales_are_used_and_not_written(stored: torch.dtype) -> None:
    """Of two heads the second has half the scale: what is stored there is twice as large, up to the largest number."""
    values = torch.tensor([1.0, -3.3, 70.0, 0.0])
    turning = torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(1, 2, 2)         # by an angle of zero
    scale = torch.tensor([0.5, 0.25])
    caches = [torch.zeros(2, 1, 2, 4).to(stored) for _ in range(2)]
    scales = [scale.expand(2, 1, 2) for _ in range(2)]
    qkv_write.rotary_write_reference(
        values.repeat(6).view(1, -1), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), turning, *caches,
        heads=2, kv_heads=2, k_scale=scales[0], v_scale=scales[1],
    )
    limit = largest_code(stored)
    wanted = values.div(scale[:, None]).clamp(-limit, limit)
    wanted = wanted.round() if stored == torch.int8 else wanted.to(stored).float()
    assert all(torch.equal(cache[1, 0].float(), wanted) for cache in caches)
    assert scale.tolist() == [0.5, 0.25]


@runs_triton
@pytest.mark.parametrize(("stored", "units"), [
    (FLOATS, 1.01 if TRITON_INTERPRETED else 0.501),     # the interpreter cuts floats instead of rounding them
    (torch.int8, 0.501),
])
def test_rotary_write_with_scales_on_triton_and_the_float64_definition(stored: torch.dtype, units: float) -> None:
    check_scales(qkv_write.rotary_write_triton, TRITON_DEVICE, stored, units)


def check_scales(function: Any, device: str, stored: torch.dtype, units: float) -> None:
    """What is stored is within this many units in the last place of value / scale, clamped to the dtype's range."""
    case = next(case for case in qkv_write.rotary_write.cases if case.name == "odd-norm")
    args, options = make_inputs(qkv_write.rotary_write, case, torch.float32, device)
    wide = [widened(value) for value in args]
    for cache in wide[4:]:
        cache.zero_()
    qkv_write.rotary_write_reference(*wide, **{name: widened(value) for name, value in options.items()})
    size = wide[4].shape[1]
    limit = largest_code(stored)
    caches = [torch.zeros(wide[4].shape, device=device).to(stored) for _ in range(2)]
    scales = [torch.zeros(wide[4].shape[:3], device=device) for _ in range(2)]
    function(*args[:4], *caches, k_scale=scales[0], v_scale=scales[1], **options)
    used = {(slot // size, slot % size) for slot in args[2].tolist()}
    for cache, scale, wanted in zip(caches, scales, wide[4:], strict=True):
        for block, slot in used:
            ratio = scale.cpu().double()[block, slot, :, None]
            assert (ratio > 0).all()
            exact = (wanted[block, slot] / ratio).clamp(-limit, limit)
            unit = torch.ones(())
            if stored.is_floating_point:
                facts = torch.finfo(stored)
                unit = torch.exp2(exact.abs().clamp(min=facts.smallest_normal).log2().floor()) * facts.eps
            assert ((cache.float().cpu().double()[block, slot] - exact).abs() <= units * unit * (1 + 1e-4)).all()
        largest = max(float(cache.float().abs()[block, slot].max()) for block, slot in used)
        assert largest > 0.9 * limit


def dequantised(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Value by value: stored times the scale of its token and head."""
    cache = cache.double()
    if scale is None:
        return cache
    for block, slot, head in itertools.product(*(range(size) for size in cache.shape[:3])):
        cache[block, slot, head] *= scale[block, slot, head].double()
    return cache


def naive_attention(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """One dot product at a time, straight from the sentence that defines what a query sees."""
    q, k_cache, v_cache, table, query_start, kv_len = args
    k_cache, v_cache = dequantised(k_cache, options.get("k_scale")), dequantised(v_cache, options.get("v_scale"))
    table_rows = options["table_rows"].tolist() if options.get("table_rows") is not None else range(len(kv_len))
    table = [table[row].tolist() for row in table_rows]
    out = torch.zeros_like(q)
    size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for row in range(len(kv_len)):
        begin, end = int(query_start[row]), int(query_start[row + 1])
        for token in range(begin, end):
            position = int(kv_len[row]) - (end - begin) + token - begin
            if position < 0:
                continue                                 # a padding row
            window = options["window"] or 10**9
            oldest = max(0, position - window + 1) if window > 0 else position // -window * -window
            places = [(int(table[row][p // size]), p % size) for p in range(oldest, position + 1)]
            blocks, offsets = map(list, zip(*places, strict=True))
            for head in range(q.shape[1]):
                keys, values = (cache[blocks, offsets, head // group] for cache in (k_cache, v_cache))
                scores = [score * options["scale"] for score in (keys @ q[token, head]).tolist()]
                if options["softcap"] is not None:
                    scores = [options["softcap"] * math.tanh(score / options["softcap"]) for score in scores]
                beside = [] if options.get("sinks") is None else [float(options["sinks"][head])]     # scores without a value
                most = max(scores + beside)
                weights, others = ([math.exp(score - most) for score in each] for each in (scores, beside))
                out[token, head] = torch.tensor(weights, dtype=values.dtype) @ values / sum(weights + others)
    return out


@float64_cases("paged_attention")
def test_paged_attention_definition(case: Case) -> None:
    args, options = float64_inputs("paged_attention", case)
    wanted = naive_attention(args, options)
    strided = (args[0], page_view(args[1]), page_view(args[2]), *args[3:])
    for given in (args, strided):
        torch.testing.assert_close(paged_attention.paged_attention(*given, **options), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_paged_attention_splits_do_not_show(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven decode rows are grouped by length and long chunks cut into pieces: same numbers as one row at a time."""
    rows = [(1, 3), (70, 90), (1, 200), (1, 5), (0, 4), (1, 190), (33, 33), (1, 4), (1, 64)]
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "block_size": 4, "window": window, "softcap": softcap}
    args, options = paged_attention.paged_attention.inputs(
        torch.Generator().manual_seed(1), torch.float64, "cpu", rows=tuple(rows), **sizes
    )
    monkeypatch.setattr(attention_reference, "MASK_ELEMENTS", 1000)
    monkeypatch.setattr(attention_reference, "GATHER_TOKENS", 300)
    decode = [row for row, (queries, _) in enumerate(rows) if queries == 1]
    groups = attention_reference._length_groups(decode, options["kv_len_host"])
    assert [len(group) for group in groups] == [2, 1, 1, 1, 1]      # 3-4, 5, 64, 190, 200: three times 200 > 300
    torch.testing.assert_close(
        paged_attention.paged_attention(*args, **options), naive_attention(args, options), rtol=1e-12, atol=1e-13
    )


def test_paged_attention_never_gathers_a_whole_long_row_for_short_ones() -> None:
    assert not attention_reference._is_similar([100] * 31 + [8000])
    groups = attention_reference._length_groups(list(range(32)), [100] * 31 + [8000])
    assert [len(group) for group in groups] == [31, 1]


@float64_cases("logprobs")
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_logprobs_definition(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    (scores, tokens, top_k), _ = float64_inputs("logprobs", case)
    chosen, ranks, top_ids, top_logprobs = logprobs.logprobs(scores, tokens, top_k)
    ties = 0
    for row, values in enumerate(scores.tolist()):
        total = math.log(math.fsum(math.exp(value) for value in values))
        order = sorted(range(len(values)), key=lambda token: (-values[token], token))
        ties += len(values) - len(set(values))
        token = int(tokens[row])
        assert float(chosen[row]) == pytest.approx(values[token] - total, abs=1e-12)
        assert int(ranks[row]) == order.index(token) + 1
        assert top_ids[row].tolist() == order[:top_k]
        best = [values[token] - total for token in order[:top_k]]
        assert top_logprobs[row].tolist() == pytest.approx(best, abs=1e-12)
    assert ties > 0


def sum_in_lanes(values: torch.Tensor, lanes: int) -> torch.Tensor:
    """Sums [S, 1] of float32 [S, V] as a loop over vector registers with this many lanes makes them."""
    parts = np.cumsum(values.numpy().reshape(len(values), -1, lanes), axis=1, dtype=np.float32)[:, -1]
    return torch.from_numpy(np.cumsum(parts, axis=1, dtype=np.float32)[:, -1:])


@pytest.mark.parametrize("lanes", [1, 4])
def test_logprobs_are_accurate_whatever_order_float32_is_summed_in(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines with narrow vectors (NEON has 4 lanes of float32) and an exponential that is off by two units."""
    case = next(case for case in logprobs.logprobs.cases if case.name == "decode-32")
    (scores, tokens, top_k), _ = make_inputs(logprobs.logprobs, case, torch.float32, "cpu")
    wanted = logprobs.logprobs_reference(scores.double(), tokens, top_k)
    exact_exp, exact_sum = torch.Tensor.exp_, torch.Tensor.sum
    asked = []

    def rough_exp(values: torch.Tensor) -> torch.Tensor:
        asked.append(values.dtype)
        return exact_exp(values).mul_(1 - 2**-22)

    def rough_sum(values: torch.Tensor, **options: Any) -> torch.Tensor:
        narrow = values.dtype is torch.float32 and "dtype" not in options
        return sum_in_lanes(values, lanes) if narrow else exact_sum(values, **options)

    monkeypatch.setattr(torch.Tensor, "exp_", rough_exp)
    monkeypatch.setattr(torch.Tensor, "sum", rough_sum)
    found = logprobs.logprobs_reference(scores, tokens, top_k)
    best = scores.amax(dim=1, keepdim=True)
    summed_in_float32 = scores.gather(1, tokens[:, None]) - best - (scores - best).exp_().sum(dim=1).log()
    monkeypatch.undo()

    def wrong(got: torch.Tensor, exact: torch.Tensor) -> int:
        allowed = logprobs.logprobs.tolerance["float32"]
        return int(((got.double() - exact).abs() > allowed.relative * exact.abs() + allowed.absolute).sum())

    assert asked and torch.float64 not in asked                  # the exponentials above were the rough ones
    assert wrong(found[0], wanted[0]) == wrong(found[3], wanted[3]) == 0
    assert wrong(summed_in_float32[:, 0], wanted[0]) >= 4        # what torch.log_softmax did there


def test_logprobs_of_banned_and_broken_rows() -> None:
    scores = torch.tensor([[float("-inf")] * 4 + [1.0], [float("nan"), 2.0, 3.0, 1.0, 3.0], [0.0] * 5])
    chosen, ranks, top_ids, _ = logprobs.logprobs(scores, torch.tensor([4, 2, 3]), 3)
    assert top_ids.tolist() == [[4, 0, 1], [2, 4, 1], [0, 1, 2]]
    assert ranks.tolist() == [1, 1, 4]
    assert float(chosen[0]) == 0.0
    empty = logprobs.logprobs(scores[:0], torch.tensor([], dtype=torch.int64), 3)
    assert [list(part.shape) for part in empty] == [[0], [0], [0, 3], [0, 3]]


# ── the registry ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def toy_op() -> Any:
    def reference(x: torch.Tensor) -> str:
        return "reference"

    op = Op(
        "toy", reference,
        kernels=[
            Implementation("native", lambda x: "native", lambda site: site.dtype is torch.float32 and site.width == 4),
            Implementation("triton", lambda x: "triton", lambda site: site.device == "cuda"),
        ],
        cost=lambda **sizes: None, inputs=lambda *a, **k: ((), {}), tolerance={},
    )
    yield op
    del REGISTRY["toy"]
    registry.set_kernels("auto")


def test_the_first_implementation_that_supports_the_site_runs(toy_op: Op[Any, Any]) -> None:
    assert toy_op(torch.zeros(2, 4)) == "native"
    assert toy_op(torch.zeros(2, 8)) == "reference"
    assert toy_op(torch.zeros(2, 4, dtype=torch.float64)) == "reference"
    assert toy_op.choose(Site("cuda", torch.float16, 4)).name == "triton"


def test_kernels_reference_switches_every_op_even_after_calls(toy_op: Op[Any, Any]) -> None:
    assert toy_op(torch.zeros(2, 4)) == "native"
    registry.set_kernels("reference")
    assert toy_op(torch.zeros(2, 4)) == "reference"
    assert toy_op.choose(Site("cuda", torch.float16, 4)).name == "reference"
    registry.set_kernels("auto")
    assert toy_op(torch.zeros(2, 4)) == "native"
    with pytest.raises(ConfigError, match="'auto' or 'reference', got 'fast'"):
        registry.set_kernels("fast")


def test_on_the_cpu_every_op_runs_its_reference_even_beside_an_interpreter() -> None:
    for op in OPS:
        # apart: the ops of its parts, each of which is asked here, too
        assert op.choose(Site("cpu", torch.float32, 64)).name in ("reference", "native", "visited", "apart")


def test_every_op_declares_an_odd_shape_a_cost_and_tolerances() -> None:
    for op in OPS:
        assert any("odd" in case.name for case in op.cases)
        assert len({case.name for case in op.cases}) == len(op.cases)
        for case in op.cases:
            for dtype in case.dtypes:
                assert op.case_cost(case, dtype).bytes > 0
                assert dtype == "float64" or dtype in op.tolerance


@pytest.mark.slow
def test_dispatch_is_cheap(toy_op: Op[Any, Any]) -> None:
    x = torch.zeros(1, 4)
    direct = toy_op.implementations[0].function
    toy_op(x)
    best = min(timeit.repeat(lambda: toy_op(x), number=1000, repeat=20)) / 1000
    bare = min(timeit.repeat(lambda: direct(x), number=1000, repeat=20)) / 1000
    assert best - bare < 5e-6                                            # about 0.5 µs on an idle machine
