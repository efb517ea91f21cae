"""Influence of blocks on a linear autoregression, in closed form."""

from collections.abc import Iterator

import numpy as np
from scipy import linalg

from .blocks import Blocks

CERTAIN = 1e-10  # a block with 1 - leverage below this cannot be left out: the rest does not determine the fit


class LinearAttribution:
    r"""Least squares of targets on ``A = [1, lags]`` with the influence of every block.

    With :math:`G = (A^\top A)^+`, :math:`B = G A^\top Y`, :math:`R = Y - AB` and :math:`h_b = a_b^\top G a_b`:

    .. math:: s_b = \lVert R_b \rVert^2 h_b, \qquad
              t_b = a_b^\top G E R_b^\top, \quad E = \tfrac{1}{|C|} \sum_{c \in C} a_c r_c.

    ``leave_one_out`` divides both by :math:`1 - h_b`, which turns the first-order parameter change into the exact one.
    A ``ridge`` adds :math:`n \cdot ridge \cdot I` to :math:`A^\top A`, intercept apart, and is held fixed when a block leaves.

    The fit is a QR of ``A`` that reads it in chunks of rows: see ``_cholesky_qr``.
    """

    def __init__(self, blocks: Blocks, *, ridge: float = 0.0, leave_one_out: bool = False):
        self.blocks, self.leave_one_out = blocks, leave_one_out
        q, n = 1 + blocks.width, blocks.n
        if n <= q and ridge == 0:
            raise ValueError(
                f"{n} blocks cannot determine {q} coefficients (1 + block_length x channels): every block would have "
                f"leverage 1. Pass ridge > 0, a smaller block_length or a longer series"
            )
        # G = W W^T, so leverage is a sum of squares and cannot come out negative
        self.W, self.B = self._cholesky_qr(np.sqrt(n * ridge)) or self._householder_qr(np.sqrt(n * ridge))
        self._self: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def self_influence(self) -> np.ndarray:
        s, h, _ = self.diagnostics()
        return s / self._remaining(h) if self.leave_one_out else s

    def influence_on(self, evaluation: Blocks) -> np.ndarray:
        E = np.zeros_like(self.B)
        for _, A, Y in self._designs(evaluation):
            E += A.T @ (Y - A @ self.B)
        direction = self.W @ (self.W.T @ E) / evaluation.n  # G E
        t = np.empty(self.blocks.n)
        for where, A, Y in self._designs(self.blocks):
            t[where] = np.einsum("bd,bd->b", A @ direction, Y - A @ self.B)
        return t / self._remaining(self.diagnostics()[1]) if self.leave_one_out else t

    def score_new(self, blocks: Blocks) -> np.ndarray:
        """``||r_c||^2 a_c^T G a_c`` of blocks that are not in the fit: the loss gradient's norm under G."""
        return self._residual_and_leverage(blocks)[0]

    def held_out_self(self) -> np.ndarray:
        """What `score_new` would give each training block if the fit had not seen it: ``||R||^2 h / (1 - h)^3``."""
        s, h, _ = self.diagnostics()
        return s / self._remaining(h) ** 3

    def diagnostics(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First-order self-influence, leverage and squared residual of the training blocks, each ``(n,)``."""
        if self._self is None:
            self._self = self._residual_and_leverage(self.blocks)
        return self._self

    def _residual_and_leverage(self, blocks: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        h, squared = np.empty(blocks.n), np.empty(blocks.n)
        buffer = np.empty((0, self.W.shape[1]))
        for where, A, Y in self._designs(blocks):
            if len(buffer) < len(A):  # one buffer for all chunks: fresh pages cost as much as the product
                buffer = np.empty((len(A), self.W.shape[1]))
            AW, R = np.matmul(A, self.W, out=buffer[: len(A)]), Y - A @ self.B
            h[where] = np.einsum("bq,bq->b", AW, AW)
            squared[where] = np.einsum("bd,bd->b", R, R)
        return squared * h, h, squared

    def _cholesky_qr(self, penalty: float) -> tuple[np.ndarray, np.ndarray] | None:
        """``(W, B)`` from ``A^T A = R^T R``, ``W = R^-1``, and once more on ``A W`` unless ``A`` is far from singular.

        The second round makes up for the squared condition number of the first (Yamamoto et al., 2015); both are matrix
        products, which Householder's reflections are not. None where even the first is too inaccurate.
        """
        q = 1 + self.blocks.width
        W = np.eye(q)
        for repeated in (False, True):
            gram = penalty**2 * (W[1:].T @ W[1:])
            cross = np.zeros((q, self.blocks.channels))
            for _, A, Y in self._designs(self.blocks):
                Q = A @ W if repeated else A
                gram += Q.T @ Q
                cross += Q.T @ Y
            R, failed = linalg.lapack.dpotrf(gram)
            reciprocal_condition = linalg.lapack.dtrcon(R)[0]
            if failed or reciprocal_condition < 1e-6:
                return None
            step = linalg.lapack.dtrtri(R)[0]
            W = W @ step
            B = W @ (step.T @ cross)
            if reciprocal_condition > 1e-2:
                break
        return W, B

    def _householder_qr(self, penalty: float) -> tuple[np.ndarray, np.ndarray]:
        """``(W, B)`` from ``[A, Y] = Q R``; directions that the series does not excite (noiseless, constant) drop out."""
        q, both = 1 + self.blocks.width, 1 + self.blocks.width + self.blocks.channels
        R = np.zeros((both, both))
        np.fill_diagonal(R[1:q, 1:q], penalty)
        for _, A, Y in self._designs(self.blocks):
            R = linalg.qr(np.vstack([R, np.hstack([A, Y])]), mode="r", overwrite_a=True, check_finite=False)[0][:both]
        U, S, Vt = linalg.svd(R[:q, :q], check_finite=False)
        kept = max(self.blocks.n, q) * np.finfo(float).eps * S[0] < S
        W = Vt[kept].T / S[kept]
        return W, W @ (U[:, kept].T @ R[:q, q:])

    @staticmethod
    def _remaining(h: np.ndarray) -> np.ndarray:
        return np.where(1 - h > CERTAIN, 1 - h, np.nan)

    @staticmethod
    def _designs(blocks: Blocks) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Chunks with the column of ones. About 1 MB each, which stays in cache, but at least two rows a column."""
        q = 1 + blocks.width
        rows = max(2**17 // q, 2 * q)
        buffer = np.ones((min(rows, blocks.n), q))
        for where, lags, targets in blocks.chunks(rows):
            A = buffer[: len(lags)]
            A[:, 1:] = lags
            yield where, A, targets
