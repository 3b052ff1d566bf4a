"""Ops that go wrong in the same way, by their ATen names, without the underscore of those that write in place unless it stands here."""

from typing import Final

__all__ = [
    "BETWEEN_ONES",
    "BETWEEN_ZERO_AND_ONE",
    "DIVISIONS",
    "EIGENVECTORS",
    "EXPONENTIALS",
    "FACTORISATIONS",
    "LOGS",
    "MEANS",
    "NORMALISERS",
    "POLES",
    "POWERS",
    "REDUCED_MAXIMA",
    "ROOTS",
    "SELECTORS",
    "SOFTMAXES",
    "SPREADS",
]

LOGS: Final = {"log", "log2", "log10", "log1p", "xlogy", "special_xlogy", "special_entr"}
DIVISIONS: Final = {"div", "reciprocal", "true_divide", "divide", "addcdiv", "remainder", "fmod", "floor_divide"}
ROOTS: Final = {"sqrt", "rsqrt", "hypot"}
POWERS: Final = {"pow", "float_power"}
SOFTMAXES: Final = {
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "logsumexp",
    "logaddexp",
    "_masked_softmax",
    "_native_multi_head_attention",
}
SELECTORS: Final = {
    "where",
    "masked_fill",
    "masked_fill_",
    "nan_to_num",
    "nan_to_num_",
    "clamp",
    "clamp_",
    "clamp_min",
    "clamp_min_",
    "clamp_max",
    "clamp_max_",
    "threshold",
    "relu",
    "relu_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "masked_scatter",
    "maximum",
    "minimum",
    "hardtanh",
    "index",
    "masked_select",
    "fmax",
    "fmin",
}
SPREADS: Final = {"std", "var", "std_mean", "var_mean"}
REDUCED_MAXIMA: Final = {"logsumexp", "amax", "max", "logcumsumexp", "cummax"}
EXPONENTIALS: Final = {"exp", "exp2", "special_exp2", "expm1", "special_expm1", "sinh", "cosh", "linalg_matrix_exp"}
MEANS: Final = {"mean", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "multi_margin_loss"}
NORMALISERS: Final = {
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "batch_norm",
    "_fused_rms_norm",
    "rms_norm",
    "cudnn_batch_norm",
}
BETWEEN_ONES: Final = frozenset({"acos", "asin", "atanh", "erfinv", "special_erfinv"})
BETWEEN_ZERO_AND_ONE: Final = frozenset({"logit", "special_logit", "special_ndtri"})
POLES: Final = frozenset({"lgamma", "digamma", "polygamma", "mvlgamma", "special_zeta"})
EIGENVECTORS: Final = {"_linalg_eigh", "_linalg_svd", "linalg_eig"}
FACTORISATIONS: Final = {
    "linalg_qr",
    "_linalg_slogdet",
    "_linalg_det",
    "linalg_inv_ex",
    "_linalg_solve_ex",
    "linalg_lu_factor_ex",
    "linalg_ldl_factor_ex",
    "linalg_lu_solve",
    "linalg_solve_triangular",
    "triangular_solve",
    "cholesky_inverse",
    "linalg_cholesky_ex",
}
