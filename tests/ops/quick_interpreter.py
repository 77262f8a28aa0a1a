"""Triton's interpreter, several times faster: a launch replaces the functions of triton.language once.

Triton does it again at every call of a helper, `tl.sum` and `tl.cdiv` included, and looks at some 400 attributes each time. What
is replaced is the same for every function that sees the same modules, so within a launch the first call of each kind does it.
And the table of numpy's types, which Triton makes anew for every tensor, is kept. So are shapes: every result of every
operation has one, as a tuple of constants, and each of those is an object with a type.
Sums and products of integers are not computed a second time in 64 bits: Triton looks at that result only in its debug mode.
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
