"""Matrices in the model's dtype, without scales."""

from torch import Tensor

from worker.ops.experts.product import MAX_BESIDE, Beside, expert_products
from worker.ops.experts.route import Routes
from worker.ops.product import gated_product, product
from worker.weights.base import Format, Grid, Matrix, Operand, Parts
from worker.weights.shard import VALUES


class PlainMatrix(Matrix):
    """values: of the model's dtype."""

    def product(
        self, x: Operand, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        assert isinstance(x, Tensor)
        rows = self.values[first_row:] if first_row else self.values
        return product(x, rows, bias) if out is None else product(x, rows, bias, out)

    def gated(self, x: Operand) -> Tensor:
        assert isinstance(x, Tensor)
        return gated_product(x, self.values)

    def experts(
        self, down: Matrix, x: Operand, routes: Routes, out: Tensor | None = None
    ) -> Tensor:
        assert isinstance(x, Tensor)
        assert self.parts.held is not None
        operands = x, routes, self.values, down.values, self.parts.held, out
        beside = _beside(self.shared) if self.shared and len(x) <= MAX_BESIDE else None
        return expert_products(*operands, finish=self.finish, beside=beside)

    def carries(self, shared: tuple[Matrix, Matrix]) -> bool:
        made = _beside(shared) if all(isinstance(m, PlainMatrix) for m in shared) else None
        return made is not None and made.takes(self.values, self.finish)


def _beside(shared: tuple[Matrix, Matrix]) -> Beside:
    return Beside(*(matrix.values for matrix in shared))


class Plain(Format):
    """All matrices are in the model's dtype."""

    name = "plain numbers"
    matrix = PlainMatrix

    def stores(self, parts: Parts) -> dict[str, Grid]:
        return {VALUES: Grid(parts.columns)}


PLAIN = Plain()
