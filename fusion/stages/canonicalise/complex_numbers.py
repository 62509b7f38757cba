"""Complex arithmetic as pairs of real values, z = complex(re, im), so that a complex RoPE is an ordinary rotation."""

from __future__ import annotations

from functools import partial
from typing import Any

from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise.translators import Out, Translated, is_number, translates

on_complex = partial(translates, complex_mode="whole")


def pair(a: Algebra, re: Value, im: Value, out: Out) -> Value:
    """Build the complex value with the parts `re` and `im`."""
    return a.make("complex", (re, im), (), out.shape, out.dtype)


def parts(a: Algebra, z: Value) -> tuple[Value, Value]:
    """Return the real and imaginary parts of `z`; for a leaf these are views of its memory."""
    if z.op == "complex":
        return z.args[0], z.args[1]
    dtype = proven(z.dtype).to_real()
    return a.make("real", (z,), (), z.shape, dtype), a.make("imag", (z,), (), z.shape, dtype)


def is_complex(value: object) -> bool:
    """Return True if `value` is a canonical value of complex numbers."""
    return isinstance(value, Value) and value.dtype is not None and value.dtype.is_complex


@on_complex("aten.view_as_complex.default")
def _view_as_complex(a: Algebra, out: Out, x: Value) -> Translated:
    re, im = (a.reshape(proven(a.slice(x, -1, lane, lane + 1)), out.shape) for lane in (0, 1))
    return pair(a, re, im, out)


@on_complex("aten.complex.default")
def _complex(a: Algebra, out: Out, re: Value, im: Value) -> Translated:
    return pair(a, a.expand(re, out.shape), a.expand(im, out.shape), out)


@on_complex("aten.view_as_real.default")
def _view_as_real(a: Algebra, out: Out, z: Value) -> Translated:
    return a.cat([a.reshape(part, (*z.shape, 1)) for part in parts(a, z)], -1)


@on_complex("aten._conj.default", "aten.conj.default")
def _conj(a: Algebra, out: Out, z: Value) -> Translated:
    re, im = parts(a, z)
    return pair(a, re, a.scale(im, -1), out)


def product(a: Algebra, out: Out, x: Any, y: Any) -> Translated:
    """Multiply: (a + bi)(c + di) = (ac - bd) + (ad + bc)i; a real operand multiplies both parts."""
    if is_number(y):
        re, im = parts(a, x)
        return x if y == 1 else pair(a, a.scale(re, y), a.scale(im, y), out)
    must(isinstance(x, Value) and isinstance(y, Value))
    if not (is_complex(x) and is_complex(y)):
        real, z = (y, x) if is_complex(x) else (x, y)
        real = a.cast(real, proven(out.dtype).to_real())
        re, im = (proven(a.mul(part, real)) for part in parts(a, z))
        return pair(a, re, im, out)
    (xr, xi), (yr, yi) = parts(a, x), parts(a, y)
    rr, ii, ri, ir = (proven(a.mul(one, other)) for one, other in ((xr, yr), (xi, yi), (xr, yi), (xi, yr)))
    return pair(a, proven(a.add(rr, a.scale(ii, -1))), proven(a.add(ri, ir)), out)
