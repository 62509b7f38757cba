"""What values mean in int8."""

from fusion import word

QUANTISE = word(
    "quantise",
    "int8(clamp(round((x + bias) / (scale · by) + zero_point + shift))); of scheme head int8(clamp(round(x · scale)))",
    x="[*B, D], of scheme head [B, N, S, C]",
    scheme='"dynamic": max|x| / 127 of each token; "static": one that the model holds; "head": a factor of each',
    scale="[*B, 1], [1], [D] or [N]", dtype="of a dynamic scale", by="a number", shift="a number", bias="[D]",
    zero_point="[1] in int8",
)  # fmt: skip
TOKEN_SCALE = word("token_scale", "max|x| / 127 over the last dim [*B, 1]", x="[*B, D]", dtype="of the scale")
PACKED_KV_ROW = word(
    "packed_kv_row",
    "[int8(latent / scale) | bits(rope) | bits(scale)]: a scale, in float32, is the largest of `tile` lanes over 127",
    latent="[*B, C]", rope="[*B, Dr] in bfloat16", tile="lanes that share a scale",
)  # fmt: skip
INT8_MATMUL = word(
    "int8_matmul",
    "(x · weightᵀ) · scale · tokens (+ bias), sums in int32",
    x="[*B, K]", weight="[N, K]", scale="[N]", tokens="[*B, 1]", bias="[N]", dtype="of the result",
    is_parameter_only="whether the weight is computed from Parameters alone",
)  # fmt: skip
