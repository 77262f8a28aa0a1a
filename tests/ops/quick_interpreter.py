"""Triton's interpreter, several times faster: a launch replaces the functions of triton.language once.

Triton does it again at every call of a helper, `tl.sum` and `tl.cdiv` included, and looks at some 400 attributes each time. What
is replaced is the same for every function that sees the same modules, so within a launch the first call of each kind does it.
And the table of numpy's types, which Triton makes anew for every tensor, is kept.
"""

from __future__ import annotations

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
