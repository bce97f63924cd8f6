"""Attention over positions, which is refused."""

from __future__ import annotations

from torch import fx, nn

from econv.conversion.plan import Plan, Value
from econv.conversion.registry import rule
from econv.conversion.trace import ConversionError, name_of


@rule(nn.MultiheadAttention, nn.TransformerEncoderLayer, many=True)
def attention_module(plan: Plan, node: fx.Node) -> Value:
    raise ConversionError("", "attention over positions is not equivariant to their rotation")


@rule("matmul", "bmm", "scaled_dot_product_attention", "einsum", "baddbmm")
def attention(plan: Plan, node: fx.Node) -> Value:
    raise ConversionError(
        "", f"{name_of(node)}: attention over positions has no equivariant counterpart"
    )
