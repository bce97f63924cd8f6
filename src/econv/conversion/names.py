"""What functions, methods and operators are called, by what becomes of them."""

from __future__ import annotations

__all__ = [
    "ATTENTION",
    "BINARY",
    "DROPS",
    "FILTERING",
    "PERMUTATIONS",
    "POINTWISE",
    "REDUCTIONS",
    "RESHAPES",
    "SOFTMAX",
    "SPLITS",
]

POINTWISE = {
    *("abs", "celu", "clamp", "clamp_min", "clamp_max", "elu", "exp", "gelu", "hardsigmoid"),
    *("hardswish", "hardtanh", "leaky_relu", "log", "log1p", "mish", "neg", "pow", "relu"),
    *("relu6", "rsqrt", "selu", "sigmoid", "silu", "softplus", "softsign", "sqrt", "square"),
    *("tanh", "threshold", "logsigmoid", "sin", "cos", "erf", "reciprocal", "sign", "logical_not"),
    *("clone", "contiguous", "detach", "to", "float", "double", "half", "bfloat16", "type"),
    *("type_as", "requires_grad", "zeros_like", "ones_like", "full_like"),
}
BINARY = {
    *("add", "iadd", "radd", "sub", "isub", "rsub", "mul", "imul", "rmul", "div", "idiv"),
    *("truediv", "itruediv", "rtruediv", "maximum", "minimum", "pow", "multiply", "subtract"),
    *("addcmul", "addcdiv", "lerp", "where", "hypot", "masked_fill", "logical_and", "logical_or"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert"),
}
DROPS = frozenset({"dropout", "dropout2d", "feature_dropout", "alpha_dropout"})
REDUCTIONS = {"mean", "sum", "amax", "amin", "std", "var", "norm", "logsumexp", "vector_norm"}
RESHAPES = {"flatten", "reshape", "view", "squeeze", "unsqueeze", "reshape_as", "view_as"}
PERMUTATIONS = {"permute", "transpose", "swapaxes", "movedim"}
SPLITS = {"chunk", "split", "tensor_split"}
SOFTMAX = {"softmax", "log_softmax"}
FILTERING = {"conv1d", "conv2d", "conv_transpose2d", "linear", "unfold", "conv3d"}
ATTENTION = {"matmul", "bmm", "scaled_dot_product_attention", "einsum", "baddbmm"}
