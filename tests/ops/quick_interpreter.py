"""Triton's interpreter, several times faster: a launch replaces the functions of triton.language once.

Triton does it again at every call of a helper, `tl.sum` and `tl.cdiv` included, and looks at some 400 attributes each time. What
is replaced is the same for every function that sees the same modules, so within a launch the first call of each kind does it.
And the table of numpy's types, which Triton makes anew for every tensor, is kept. So are shapes: every result of every
operation has one, as a tuple of constants, and each of those is an object with a type.
Sums and products of integers are not computed a second time in 64 bits: Triton looks at that result only in its debug mode.
Operands of one type and shape need neither cast nor broadcast, and a number beside a tensor becomes the same constant each time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any


def install() -> None:
    """In a process with TRITON_INTERPRET=1, before the first launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter._patch_lang.__module__ == __name__:
        return                           # a fork of a process that has done it
    replace_all, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced = set[int]()                # ids of modules, in the launch that runs

    def replace_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if seen and seen <= replaced:
            return None                  # Triton restores only what the launch itself has replaced
        replaced.update(seen)
        return replace_all(function)

    def launch_with_none_replaced(self: Any, *args: Any, **options: Any) -> None:
        replaced.clear()
        try:
            launch(self, *args, **options)
        finally:
            replaced.clear()

    find_type, found = interpreter._get_np_dtype, dict[str, Any]()

    def find_type_once(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(element, tl.pointer_type):
            return find_type(kind)
        if element.name not in found:
            found[element.name] = find_type(element)
        return found[element.name]

    interpreter._get_np_dtype = find_type_once
    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_with_none_replaced
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _keep_shapes(tl.core)
    _keep_operands(type(interpreter.interpreter_semantic), tl)
    interpreter._patch_attr = _patch_once
    handle, check_size = interpreter.TensorHandle, interpreter.TensorHandle.__post_init__

    def check_size_of_pointers_too(self: Any) -> None:
        if type(self.dtype) is not tl.dtype or self.data.itemsize * 8 > self.dtype.primitive_bitwidth:
            check_size(self)                                         # numpy's smallest type has more bits than int1

    handle.__post_init__ = check_size_of_pointers_too


def _patch_once(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of triton.language that knows the interpreter. Triton's own looks at every keyword, twice."""
    from triton.runtime.interpreter import interpreter_semantic as semantic

    function = getattr(member, "__wrapped__", member)                # which the decorator calls if there is a `_semantic`

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    scope.set_attr(obj, name, call)


def _keep_operands(semantic: Any, tl: Any) -> None:
    """What `binary_op_type_checking_impl` returns for the same two types is the same."""
    check_any, tensor, halves = semantic.binary_op_type_checking_impl, tl.tensor, (tl.float16, tl.bfloat16)
    constants = dict[tuple[Any, ...], Any]()

    def check(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if type(lhs) is not tensor:
            return check_any(self, lhs, rhs, *options)
        if type(rhs) is tensor:
            same = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and type(lhs.dtype) is tl.dtype
            if same and not (div_or_mod and lhs.dtype in halves):
                return lhs, rhs
            return check_any(self, lhs, rhs, *options)
        if type(rhs) not in (int, float, bool):
            return check_any(self, lhs, rhs, *options)
        key = type(rhs), rhs, lhs.dtype.name, id(lhs.shape), *options
        if key not in constants:
            left, right = check_any(self, lhs, rhs, *options)
            if left is not lhs:                                      # it was cast
                return left, right
            constants[key] = right
        return lhs, constants[key]

    semantic.binary_op_type_checking_impl = check


def _keep_shapes(core: Any) -> None:
    constexpr, unwrap_any = core.constexpr, core._unwrap_if_constexpr
    containers = (list, tuple, core.tuple)

    def unwrap(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return unwrap_any(value) if isinstance(value, containers) else value

    sizes = dict[tuple[int, ...], tuple[Any, int, str]]()            # the tuple of a type, its product and its text
    constants = dict[tuple[int, ...], tuple[Any, Any]]()             # the tuple of a tensor and the constant of its product
    make_type, nothing = core.block_type.__init__, core.tuple(())

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(map(unwrap, shape))
        if key not in sizes:
            make_type(self, element_ty, shape)                       # with all its checks
            sizes[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = sizes[key]
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in constants:
            constants[shape] = core.tuple([constexpr(size) for size in shape]) if shape else nothing, constexpr(math.prod(shape))
        self.shape, self.numel = constants[shape]

    core._unwrap_if_constexpr = unwrap
    core.block_type.__init__ = make_type_once
    core.tensor.__init__ = make_tensor
