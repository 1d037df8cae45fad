"""Worked arithmetic: one operation written as steps that a very small model can learn."""

from typing import NamedTuple


class Atom(NamedTuple):
    """One written line of arithmetic, `left op right = result`."""

    left: int
    op: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right} = {self.result}"


class Inexact(ValueError):
    """The operation has no non-negative integer result."""


def evaluate(left: int, op: str, right: int) -> int:
    """The result of one operation; raises Inexact when it is negative or not an integer."""
    if op == "+":
        return left + right
    if op == "*":
        return left * right
    if op == "-":
        if right > left:
            raise Inexact(f"{left} - {right}")
        return left - right
    if right == 0 or left % right:
        raise Inexact(f"{left} / {right}")
    return left // right


def places(number: int) -> list[int]:
    """The non-zero places of a number, largest first: 305 gives [300, 5]."""
    digits = str(number)
    scale = [10**power for power in range(len(digits) - 1, -1, -1)]
    return [int(digit) * unit for digit, unit in zip(digits, scale, strict=True) if digit != "0"]


def expand(left: int, op: str, right: int) -> list[Atom]:
    """The atoms that lead from an operation to its result, which the last atom holds.

    Raises Inexact as `evaluate` does.
    """
    result = evaluate(left, op, right)
    if op == "*":
        return _multiply(left, right)
    if op == "/":
        return _divide(left, right)
    rest = right % 100
    if right < 100 or rest == 0:
        return [Atom(left, op, right, result)]
    middle = evaluate(left, op, right - rest)
    return [Atom(left, op, right - rest, middle), Atom(middle, op, rest, result)]


def worked(left: int, op: str, right: int) -> str:
    """The atoms, behind the operation itself where there are several."""
    atoms = expand(left, op, right)
    lead = "" if len(atoms) == 1 else f"{left} {op} {right}. "
    return lead + ", ".join(map(str, atoms))


def _multiply(left: int, right: int) -> list[Atom]:
    """Partial products of single places, added as they come."""
    atoms: list[Atom] = []
    total = 0
    for a in places(left):
        for b in places(right):
            atoms.append(Atom(a, "*", b, a * b))
            if total:
                atoms.append(Atom(total, "+", a * b, total + a * b))
            total += a * b
    return atoms or [Atom(left, "*", right, 0)]


def _divide(left: int, right: int) -> list[Atom]:
    """Division by place: take off the largest part that divides, divide it, add the quotients."""
    atoms: list[Atom] = []
    rest, total = left, 0
    for part in places(left // right):
        atoms.append(Atom(part * right, "/", right, part))
        if total:
            atoms.append(Atom(total, "+", part, total + part))
        total += part
        if rest != part * right:
            atoms.append(Atom(rest, "-", part * right, rest - part * right))
        rest -= part * right
    return atoms or [Atom(left, "/", right, 0)]
