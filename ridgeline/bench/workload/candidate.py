"""Checks a candidate kernel for an op: is it correct on fresh inputs, and does it really do the work?

A kernel under development fools its author in known ways, and each has its check here:

    wrong on untested sizes          every case of the op, odd ones included, with inputs from a seed that is new each time
    reads uninitialised memory       memory it allocates is full of NaN, and so are outputs that are passed to it
    falls back silently              no function and no kernel of the current implementations may run inside it
    returns a stale buffer           a result must stay what it was when the next call is made
    returns what it was given        a result may share memory with an argument only where the definition's does, or that
                                     of the implementation that runs now; the same holds for changing an argument
    remembers by address             the same tensors with other values must give other results

The definition in float64 is the judge, with the op's own tolerance.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline.ops
from ridgeline.ops.registry import Implementation, Op, Site, Tolerance
from ridgeline.sizes.op_costs import Case

Call = tuple[tuple[Any, ...], dict[str, Any]]
_OPS = str(Path(ridgeline.ops.__path__[0]).resolve())
# What a candidate may use of the package: the contract, launch options, and shapes; not what computes.
_SHARED = ("registry.py", "launch.py")
_POISON = {torch.bool: True}         # the rest: NaN, or the largest number of an integer type


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    case: str
    dtype: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.case}, {self.dtype}): {self.detail}"


# ── one call, watched ────────────────────────────────────────────────────────────────────────────────────────────────


class _Poisoned(TorchDispatchMode):
    """Whatever is allocated without a value is NaN."""

    _EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                                         # else torch imports its compiler to keep it out: seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and function.overloadpacket.__name__ in self._EMPTY:
            poison(made)
        return made


def _plain(tensor: Tensor) -> Tensor:
    """Numbers of one byte have hardly any operations: their bits will do."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def poison(tensor: Tensor) -> None:
    if _plain(tensor) is not tensor:
        _plain(tensor).fill_(0x7F)                           # NaN in every format of eight bits that has one
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype in _POISON:
        tensor.fill_(_POISON[tensor.dtype])
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


@contextmanager
def watched(op: Op[Any, Any]) -> Iterator[list[str]]:
    """Names of the op's current implementations, and of anything else under ridgeline/ops, that ran inside."""
    known: dict[CodeType, str] = {
        code: implementation.name
        for implementation in op.implementations
        if (code := getattr(implementation.function, "__code__", None)) is not None
    }
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code in known:
            found.append(f"the current implementation {known[code]!r}")
        elif code is Op.__call__.__code__:
            found.append(f"the op {getattr(frame.f_locals.get('self'), 'name', '?')!r} itself")
        elif code.co_filename.startswith(_OPS) and Path(code.co_filename).name not in _SHARED:
            found.append(f"{code.co_name} of ridgeline/ops/{Path(code.co_filename).name}")
        elif code.co_name == "run" and "triton" in code.co_filename:
            kernel = getattr(frame.f_locals.get("self"), "fn", None)
            if str(getattr(kernel, "__module__", "")).startswith("ridgeline.ops"):
                found.append(f"the kernel {getattr(kernel, '__name__', '?')} of {kernel.__module__}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def results(function: Callable[..., Any], call: Call, outputs: set[int]) -> list[Tensor]:
    """What a call returns, and those of its arguments that are there to be written."""
    returned = _tensors(function(*call[0], **call[1]))
    arguments = _tensors(call)
    return returned + [arguments[place] for place in sorted(outputs)]


# ── the checks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _poison(reference: Callable[..., Any], first: Call, second: Call, outputs: set[int]) -> None:
    """Outputs that the definition never reads hold NaN before a call: a candidate that leaves a place out shows."""
    if outputs and _writes_only(reference, first, outputs):
        for place in outputs:
            for call in (first, second):
                poison_where_written(reference, call, place)


def check(
    op: Op[Any, Any], candidate: Implementation, case: Case, dtype: str, device: str, seed: int, slack: float = 1.0
) -> list[Fault]:
    """Every fault of one case: empty for a candidate that is right and itself."""
    reference = op.implementations[-1].function
    function = candidate.function
    tolerance = op.tolerance[dtype]
    faults: list[Fault] = []

    def fault(kind: str, detail: str) -> None:
        faults.append(Fault(kind, case.name, dtype, detail))

    def inputs(number: int) -> Call:
        return op.inputs(torch.Generator().manual_seed(seed + number), getattr(torch, dtype), device, **case.sizes)

    first, second = inputs(0), inputs(1)
    writes = _written(reference, first)
    # An argument that is changed in one dtype and not in another is scratch. Numbers of one byte are not what float64
    # writes in their place: a candidate that reads them fails.
    always = writes & _written(reference, _copy(first, wide=True))
    outputs = {place for place in always if _tensors(first)[place].element_size() > 1}
    expected = [results(reference, _copy(call, wide=True), outputs) for call in (first, second)]
    _poison(reference, first, second, outputs)
    current = op.choose(Site(device, getattr(torch, dtype), first[0][0].shape[-1])).function
    may_change = writes | _written(current, inputs(2))
    may_share = _aliases(reference, inputs(2)) | _aliases(current, inputs(2))
    untouched = _copy(first)
    try:
        with torch.inference_mode(), watched(op) as ran, _Poisoned():
            made = results(function, first, outputs)
        returned = made[: len(made) - len(outputs)]
        kept = [tensor.clone() for tensor in made]
        with torch.inference_mode(), _Poisoned():
            again = results(function, second, outputs)
    except Exception as error:                               # a candidate may fail in any way there is
        fault("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return faults
    if ran:
        fault("silent fallback", f"it ran {', '.join(dict.fromkeys(ran))}")
    if (wrong := difference(kept, expected[0], tolerance, dtype, slack, len(outputs))) is not None:
        fault("wrong result", wrong)
    for place in _changed(untouched, first):
        if place not in may_change:
            fault("changed argument", f"argument {place} is not what it was, and the definition leaves it alone")
    if more := _aliases_of(returned, first) - may_share:
        fault("returned its input", f"result {sorted(more)[0][0]} shares the memory of argument {sorted(more)[0][1]}")
    if (wrong := difference(again, expected[1], tolerance, dtype, slack, len(outputs))) is not None and not faults:
        fault("stale result", f"the second call, with other inputs: {wrong}")
    if any(not _same(before, after) for before, after in zip(kept, returned, strict=False)):
        fault("stale buffer", "the first call's result changed with the second call: both are one buffer")
    if not faults:
        faults += _check_memory(op, function, case, dtype, inputs, outputs, slack)
    return faults


def _check_memory(
    op: Op[Any, Any], function: Callable[..., Any], case: Case, dtype: str, inputs: Callable[[int], Call],
    outputs: set[int], slack: float,
) -> list[Fault]:
    """The very same tensors with other values in them."""
    call, other = inputs(3), inputs(4)
    with torch.inference_mode(), _Poisoned():
        results(function, call, outputs)
        for old, new in zip(_tensors(call), _tensors(other), strict=True):
            if old.shape == new.shape:
                old.copy_(new)
        expected = results(op.implementations[-1].function, _copy(call, wide=True), outputs)
        made = results(function, call, outputs)
    wrong = difference(made, expected, op.tolerance[dtype], dtype, slack, len(outputs))
    return [] if wrong is None else [Fault("remembered result", case.name, dtype, f"same tensors, new values: {wrong}")]


def difference(
    made: list[Tensor], expected: list[Tensor], tolerance: Tolerance, dtype: str, slack: float, outputs: int
) -> str | None:
    """How a result is off; None where it is within the tolerance. The last `outputs` of them were arguments."""
    returned = len(made) - outputs
    if len(made) != len(expected):
        return f"{len(made)} tensors where the definition gives {len(expected)}"
    for number, (got, wanted) in enumerate(zip(made, expected, strict=True)):
        if got.shape != wanted.shape:
            return f"result {number} has the shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
        if not got.is_floating_point():
            if not torch.equal(got.cpu(), wanted.cpu()):
                return f"result {number} differs in {int((got.cpu() != wanted.cpu()).sum())} of {got.numel()} integers"
            continue
        # The definition runs in float64: what it returns in another dtype (codes, scales) has that dtype for every input.
        own = getattr(torch, dtype) if wanted.dtype == torch.float64 else wanted.dtype
        if number < returned and got.dtype != own:
            return f"result {number} is {got.dtype}, not {str(own)[6:]}"
        wide, wanted = got.cpu().double(), wanted.cpu().double()
        if poisoned := int((wide.isnan() & ~wanted.isnan()).sum()):
            return f"result {number} has {poisoned} NaN of {got.numel()}: memory that was never written"
        off = (wide - wanted).abs() - slack * (tolerance.relative * wanted.abs() + tolerance.absolute)
        off = off.masked_fill((wide == wanted) | (wide.isnan() & wanted.isnan()), -1.0)
        if bool((off > 0).any()):
            place = int(off.argmax())
            return (
                f"result {number} is {wide.flatten()[place]:.6g} where {wanted.flatten()[place]:.6g} is expected, "
                f"in {int((off > 0).sum())} of {got.numel()} places"
            )
    return None


# ── what the definition does to its arguments ────────────────────────────────────────────────────────────────────────


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor of a call, those inside of lists and dataclasses too."""
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure, with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(*(_mapped(each, change) for each in value)) if hasattr(value, "_fields") else type(value)(
            _mapped(each, change) for each in value
        )
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: _mapped(getattr(value, each.name), change) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **fields)
    return value


def _copy(call: Call, wide: bool = False) -> Call:
    """Tensors cloned; on the host in float64 where the definition is to judge."""

    def copied(tensor: Tensor) -> Tensor:
        if not wide:
            return tensor.clone()
        return tensor.to("cpu", torch.float64, copy=True) if tensor.is_floating_point() else tensor.to("cpu", copy=True)

    copy: Call = _mapped(call, copied)
    return copy


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = _plain(one), _plain(other)
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) if one.is_floating_point() else torch.equal(one, other)


def _changed(before: Call, after: Call) -> set[int]:
    pairs = zip(_tensors(before), _tensors(after), strict=True)
    return {place for place, (one, other) in enumerate(pairs) if not _same(one, other)}


def _written(reference: Callable[..., Any], call: Call) -> set[int]:
    """Arguments that the definition changes, by their place among the tensors."""
    copy = _copy(call)
    with torch.inference_mode():
        reference(*copy[0], **copy[1])
    return _changed(call, copy)


def poison_where_written(reference: Callable[..., Any], call: Call, place: int) -> None:
    """NaN wherever the definition writes in that argument; the rest has to stay as it is."""
    copy = _copy(call)
    with torch.inference_mode():
        reference(*copy[0], **copy[1])
        noise = _tensors(call)[place].clone()
        poison(noise)
        target, after, noise = _plain(_tensors(call)[place]), _plain(_tensors(copy)[place]), _plain(noise)
        target.copy_(torch.where(target != after, noise, target))


def _writes_only(reference: Callable[..., Any], call: Call, places: set[int]) -> bool:
    """Whether the definition never reads what it writes there: its result is the same with NaN in its place."""
    plain, poisoned = _copy(call), _copy(call)
    try:
        for place in places:
            poison_where_written(reference, poisoned, place)
        with torch.inference_mode():
            reference(*plain[0], **plain[1])
            reference(*poisoned[0], **poisoned[1])
    except IndexError:                                   # it reads indices there
        return False
    return not _changed(plain, poisoned) & places


def _aliases(reference: Callable[..., Any], call: Call) -> set[tuple[int, int]]:
    with torch.inference_mode():
        return _aliases_of(results(reference, call, set()), call)


def _aliases_of(made: list[Tensor], call: Call) -> set[tuple[int, int]]:
    """Pairs (result, argument) that share memory."""

    def memory(tensors: list[Tensor]) -> list[tuple[int, int]]:
        return [(place, tensor.untyped_storage().data_ptr()) for place, tensor in enumerate(tensors) if tensor.numel()]

    owners = {pointer: place for place, pointer in memory(_tensors(call))}
    return {(number, owners[pointer]) for number, pointer in memory(made) if pointer in owners}
